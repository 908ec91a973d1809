"""`fxmem pipeline`: plan a pipeline ahead of time, from a zoo model, a function, or a Hugging Face configuration."""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from fxmem.cli.arguments import load_model, parse_budget
from fxmem.errors import OptionError

LLAMA_70B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {"llama-70b": LLAMA_70B}
OPTIMIZERS = {"none": None, "sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@click.command(short_help="Cut a model over devices.")
@click.argument("model", default="llama-70b")
@click.option("--num-stages", type=int, default=4, show_default=True, help="devices")
@click.option("--num-microbatches", type=int, help="default: chosen")
@click.option("--budget", help='bytes a device, "6GiB", a fraction, or "min" (default: --device\'s memory)')
@click.option("--device", "device_spec", help="plan for a device that is not here: a preset or a JSON file")
@click.option("--schedule", default="auto", show_default=True)
@click.option("--planner", default="auto", show_default=True)
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True, help="of a configuration's parameters")
@click.option("--sequence", type=int, default=4096, show_default=True, help="tokens a row, for a configuration")
@click.option("--batch", type=int, help="rows, for a configuration (default: one a microbatch, 4 a stage)")
@click.option("--solve-s", type=float, help="limit on a stage planner's work, in seconds of a reference core")
@click.option("--tiers", help="host, disk, or auto: where stages may offload saved tensors to")
@click.option("--offload-dir", type=click.Path(path_type=Path), help="directory of the disk tier")
@click.option("--size", type=click.Choice(["tiny", "small"]), default="small", show_default=True, help="of a zoo model")
@click.option("--report", type=click.Path(path_type=Path), help="write an HTML report")
@click.option("--json", "as_json", is_flag=True, help="print one JSON document")
def pipeline(
    model: str, num_stages: int, num_microbatches: int | None, budget: str | None, device_spec: str | None,
    optimizer: str, dtype: str, sequence: int, batch: int | None, size: str, report: Path | None, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Cut MODEL over devices and plan each stage's memory; runs nothing.

    MODEL: llama-70b, a JSON file with a Hugging Face configuration of a causal language model, a name of the zoo, or
    package.module:function that returns (model, args).
    """
    import fxmem

    started = time.perf_counter()
    if model in CONFIGS or model.endswith(".json"):
        config = CONFIGS.get(model) or json.loads(Path(model).read_text())
        module, args = from_config(config, dtype, batch or num_microbatches or 4 * num_stages, sequence)
    else:
        module, args = load_model(model, size)
    limit = parse_budget(budget) if budget is not None else _memory_of(device_spec)
    kind = OPTIMIZERS[optimizer]
    made = fxmem.pipeline(
        module, args, limit, num_stages=num_stages, num_microbatches=num_microbatches, device_spec=device_spec,
        optimizer=kind and kind(module.parameters(), lr=1e-3), **options,
    ).plan  # fmt: skip
    planning = {"planning_s": time.perf_counter() - started, "host_peak_bytes": _host_peak_bytes()}
    if report is not None:
        made.report(report)
    if as_json:
        figures = dataclasses.asdict(dataclasses.replace(made, lanes=())) | {"gap": made.gap} | planning
        click.echo(json.dumps({"model": model, "device": device_spec, **figures}, indent=2))
    else:
        click.echo(f"{made}\nplanned in {planning['planning_s']:.0f} s, {planning['host_peak_bytes'] / 2**30:.1f} GiB")


def from_config(config: dict[str, Any], dtype: str, num_rows: int, sequence: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """A causal language model with its loss on the meta device, and a batch. Raises OptionError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from fxmem.testing.zoo import LanguageModelLoss

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise OptionError(f"unknown dtype {dtype!r}: choose bfloat16, float16 or float32")
    fields = {k: v for k, v in config.items() if k != "model_type"}
    try:
        made = AutoConfig.for_model(config["model_type"], **fields)
    except (KeyError, ValueError) as error:
        raise OptionError(f"not a Hugging Face configuration: {error}") from error
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(made, dtype=kind)  # type: ignore[no-untyped-call]
    return LanguageModelLoss(network), (torch.empty(num_rows, sequence, dtype=torch.int64, device="meta"),)


def _memory_of(spec: str | None) -> int | None:
    from fxmem.analysis.devices import device_spec

    return device_spec(spec).memory_bytes if spec is not None else None


def _host_peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
