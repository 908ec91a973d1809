"""Splitting: what a step costs under a budget with and without it, planned for a device and run here.

    python -m bench.fission [--models gpt2,llama_32000] [--budgets min,0.5,0.4,0.3] [--size small] [--run] [--json]

One line for each model, budget and `fission=` "off" or "auto": `extra_pct` over the unsplit step's op time (on the
machine of `--device-spec`), `peak_bytes` predicted, the parts of each region, `kernels`, and the planner's seconds of
work (`plan_s`, by the clock). With `--run` the model is trained for two steps under the plan: `measured_bytes` of the
second, the largest relative error of a gradient against eager mode (`gradient_error`), and the step's wall time against
eager's, run in turns (`wall_ratio`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import fxmem
from bench.common import Row, gradients, relative_error, show
from fxmem.budget import Budget
from fxmem.testing import zoo

MODELS = ("gpt2", "llama_32000", "bert", "unet", "vit")
"""Measured by default; `llama_8b` and `llama_8b_bf16`, a real model's shape on meta tensors, are planned only."""
_LLAMA_8B = {"llama_8b": torch.float32, "llama_8b_bf16": torch.bfloat16}
BUDGETS = ("min", "0.5", "0.4", "0.35", "0.3", "0.25")
_NUM_PAIRS = 5


def build(name: str, size: zoo.Size) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of the zoo; `llama_32000`: four layers, a real vocabulary; `llama_8b`: Llama 3's, on meta tensors."""
    torch.manual_seed(0)
    if name == "llama_32000":
        vocab, batch, length = (32000, 4, 256) if size == "small" else (32000, 2, 16)
        return _llama(vocab, batch, length, 4, hidden=256, mlp=768, heads=4, kv_heads=2)
    if name in _LLAMA_8B:
        with torch.device("meta"):
            layers = 32 if size == "small" else 2
            module, args = _llama(128256, 1, 8192, layers, hidden=4096, mlp=14336, heads=32, kv_heads=8)
            return module.to(_LLAMA_8B[name]), args
    return zoo.build(name, size)


def _llama(
    vocab: int, batch: int, length: int, layers: int, *, hidden: int, mlp: int, heads: int, kv_heads: int
) -> tuple[nn.Module, tuple[Any, ...]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=length, bos_token_id=0,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return zoo.LanguageModelLoss(LlamaForCausalLM(config)), (torch.randint(vocab, (batch, length)),)


def planned(module: nn.Module, args: Sequence[Any], budget: Budget, fission: Any, device_spec: str) -> Row:
    """What a plan says; `min_bytes` where there is none."""
    row: Row = dict.fromkeys(("extra_pct", "peak_bytes", "unplanned_bytes", "min_bytes", "parts", "kernels"), "")
    started = time.perf_counter()
    try:
        plan = fxmem.plan(module, args, budget, device_spec=device_spec, fission=fission)
    except fxmem.BudgetInfeasible as error:
        return {**row, "min_bytes": error.min_bytes, "plan_s": time.perf_counter() - started}
    return {
        **row,
        "extra_pct": 100 * plan.extra_s / plan.baseline_s,
        "peak_bytes": plan.peak_bytes,
        "unplanned_bytes": plan.baseline_peak_bytes,
        "parts": "; ".join(f"{f.num_parts}{' fused' if f.fuse else ''}" for f in plan.program.fissions),
        "kernels": sum(not plan.program.is_folded(op) and not op.is_input for op in plan.program.ops),
        "plan_s": time.perf_counter() - started,
    }


def run(module: nn.Module, args: Sequence[Any], budget: Budget, fission: Any) -> Row:
    """Two steps of training under the budget, then pairs of steps with and without fxmem."""
    expected = gradients(module, module, args)
    step = fxmem.compile(module, budget, fission=fission)
    found = [gradients(module, step, args) for _ in range(2)][-1]
    measured = fxmem.measure(lambda: step(*args).backward()).peak_bytes
    times = [(_seconds(module, step, args), _seconds(module, module, args)) for _ in range(_NUM_PAIRS)]
    return {
        "measured_bytes": measured,
        "predicted_bytes": step.plan.peak_bytes,
        "gradient_error": relative_error(found, expected),
        "wall_ratio": statistics.median(ours / eager for ours, eager in times),
    }


def _seconds(module: nn.Module, function: Callable[..., Any], args: Sequence[Any]) -> float:
    module.zero_grad()
    started = time.perf_counter()
    function(*args).backward()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--size", choices=["tiny", "small"], default="small")
    parser.add_argument("--device-spec", default="cpu")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for name in options.models.split(","):
        module, args = build(name, options.size)
        for text in options.budgets.split(","):
            budget: Budget = text if text == "min" else float(text)
            for fission in ("off", "auto"):
                row = planned(module, args, budget, fission, options.device_spec)
                if options.run and "peak_bytes" in row:
                    row |= run(module, args, row["peak_bytes"] if budget == "min" else budget, fission)
                rows.append({"model": name, "budget": text, "fission": fission, **row})
    show(rows, options.json, "splitting, on and off")


if __name__ == "__main__":
    main()
