"""Splitting: what a step costs under a budget with and without it, planned for a device and run here.

    python -m bench.fission [--models gpt2,llama_32000] [--budgets min,0.5,0.4,0.3] [--size small] [--run] [--json]

Lines for each model and budget (a share of the unsplit step's peak): `fission=` "off" and "auto", and "by hand", the
loss over tokens split in the model's own code (`bench.by_hand`) and planned unsplit. `extra_pct` over the unsplit
step's op time (on the machine of `--device-spec`), `peak_bytes` predicted, the parts of each region, `kernels`, and the
planner's seconds of work (`plan_s`, by the clock).

With `--run` the model is trained under the plan: `measured_bytes` of the third step, `predicted_bytes`, the relative
error of the gradients against eager mode (`gradient_error`), and the step's wall time against eager's, run in turns
(`wall_ratio`, the median). Then a line for inductor alone and one with its `auto_chunker`: `parts` says whether that
split anything, and why not.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

import fxmem
from bench.by_hand import NUM_PARTS, split_by_hand
from bench.common import Row, gradients, parts_of, relative_error, show
from fxmem import compat
from fxmem.budget import Budget
from fxmem.testing import zoo

MODELS = ("gpt2", "llama_32000", "bert", "unet", "vit")
"""Measured by default; those of `_LLAMA_8B`, a real model's shape on meta tensors, are planned only."""
_LLAMA_8B = {"llama_8b": torch.float32, "llama_8b_bf16": torch.bfloat16, "llama_8b_lora": torch.bfloat16}
BUDGETS = ("min", "0.5", "0.4", "0.35", "0.3", "0.25")
_NUM_PAIRS = 5


def build(name: str, size: zoo.Size) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of the zoo; `llama_32000`: four layers, a real vocabulary; `llama_8b`: Llama 3's, on meta tensors,
    with `_lora` all but adapters of queries and values frozen."""
    torch.manual_seed(0)
    if name == "llama_32000":
        vocab, batch, length = (32000, 4, 256) if size == "small" else (32000, 2, 16)
        return _llama(vocab, batch, length, 4, hidden=256, mlp=768, heads=4, kv_heads=2)
    if name in _LLAMA_8B:
        with torch.device("meta"):
            layers = 32 if size == "small" else 2
            module, args = _llama(128256, 1, 8192, layers, hidden=4096, mlp=14336, heads=32, kv_heads=8)
            if name.endswith("_lora"):
                _freeze(module)
            return module.to(_LLAMA_8B[name]), args
    return zoo.build(name, size)


def _freeze(module: nn.Module) -> None:
    """All but adapters, which it is given."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=16, target_modules=["q_proj", "v_proj"])
    module.model = get_peft_model(cast(Any, module.model), adapters)


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


def planned(
    module: nn.Module, args: Sequence[Any], budget: Budget, fission: Any, unsplit: fxmem.Plan, device_spec: str
) -> Row:
    """What a plan says beside that of the `unsplit` step without a budget; `min_bytes` where there is none."""
    row: Row = dict.fromkeys(("extra_pct", "peak_bytes", "unplanned_bytes", "min_bytes", "parts", "kernels"), "")
    row["unplanned_bytes"] = unsplit.baseline_peak_bytes
    started = time.perf_counter()
    try:
        plan = fxmem.plan(module, args, budget, device_spec=device_spec, fission=fission)
    except fxmem.BudgetInfeasible as error:
        return {**row, "min_bytes": error.min_bytes, "plan_s": time.perf_counter() - started}
    return {
        **row,
        "extra_pct": 100 * ((plan.baseline_s + plan.extra_s) / unsplit.baseline_s - 1),
        "peak_bytes": plan.peak_bytes,
        "parts": parts_of(plan),
        "kernels": sum(not plan.program.is_folded(op) and not op.is_input for op in plan.program.ops),
        "plan_s": time.perf_counter() - started,
    }


_MEASURED = ("measured_bytes", "predicted_bytes", "gradient_error", "wall_ratio")


def run(module: nn.Module, args: Sequence[Any], budget: Budget, fission: Any, eager: nn.Module) -> Row:
    """Steps of training under the budget, then pairs of steps with and without fxmem. `eager`: trains the same tensors.

    With costs measured here, there may be no plan.
    """
    step = fxmem.compile(module, budget, fission=fission)
    try:
        row = measured(step, args, eager)
    except fxmem.BudgetInfeasible:
        return dict.fromkeys(_MEASURED, "")
    return {**row, "predicted_bytes": step.plan.peak_bytes}


def measured(step: Callable[..., Any], args: Sequence[Any], eager: nn.Module) -> Row:
    """What two steps and a third give; times in pairs."""
    row: Row = dict.fromkeys(_MEASURED, "")
    expected = gradients(eager, eager, args)
    found = [gradients(eager, step, args) for _ in range(2)][-1]
    row["measured_bytes"] = fxmem.measure(lambda: step(*args).backward()).peak_bytes
    times = [(_seconds(eager, step, args), _seconds(eager, eager, args)) for _ in range(_NUM_PAIRS)]
    eager.zero_grad()
    row["gradient_error"] = relative_error(found, expected)
    row["wall_ratio"] = statistics.median(ours / theirs for ours, theirs in times)
    return row


def inductor(module: nn.Module, args: Sequence[Any], chunks: bool) -> Row:
    """A step compiled by inductor alone, with its own splitting or without; `parts`: what that did."""
    torch.compiler.reset()
    with compat.auto_chunking() if chunks else contextlib.nullcontext([""]) as outcomes:
        row = measured(torch.compile(module), args, module)
    torch.compiler.reset()
    return {"parts": "; ".join(outcomes), **row}


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
    rows: list[Row] = []
    for name in options.models.split(","):
        module, args = build(name, options.size)
        unsplit = fxmem.plan(module, args, device_spec=options.device_spec)
        hand = split_by_hand(module)
        kinds: list[tuple[str, nn.Module, str]] = [("off", module, "off"), ("auto", module, "auto")]
        kinds += [("by hand", hand, "off")] if hand is not None else []
        for text in options.budgets.split(","):
            budget: Budget = text if text == "min" else int(float(text) * unsplit.baseline_peak_bytes)
            for kind, function, fission in kinds:
                row = planned(function, args, budget, fission, unsplit, options.device_spec)
                if function is hand:
                    row["parts"] = str(NUM_PARTS)
                if options.run:
                    row |= run(function, args, budget, fission, module)
                rows.append({"model": name, "budget": text, "fission": kind, **row})
        for chunks in (False, True) if options.run else ():
            kind = "inductor's auto_chunker" if chunks else "inductor"
            blank = dict.fromkeys(rows[-1], "")
            rows.append({**blank, "model": name, "fission": kind, **inductor(module, args, chunks)})
    show(rows, options.json, "splitting, on and off")


if __name__ == "__main__":
    main()
