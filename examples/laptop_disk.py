"""A step that recomputing alone can't fit into memory: what backward needs goes to disk in the meantime.

Splitting would do here, too; it is off so that there is something to move.
"""

import tempfile

import torch
from torch import Tensor, nn

import fxmem


class Net(nn.Module):
    """Layers that each take all of what the one before made, so that little can be given up and made again."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        kept = [x]
        for layer in self.layers:
            kept.append(torch.tanh(layer(kept[-1])))
        return sum((value.square().mean() for value in kept), x.new_zeros(()))


def main() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2048, 128)
    alone = fxmem.plan(model, (x,), budget="min", solve_s=0.2, fission="off").peak_bytes
    with tempfile.TemporaryDirectory() as folder:
        budget = int(0.97 * alone)
        step = fxmem.compile(model, budget=budget, tiers="disk", offload_dir=folder, solve_s=0.2, fission="off")
        for _ in range(2):
            model.zero_grad()
            step(x).backward()
        moved = step.plan.simulation.bytes_moved
        measured = fxmem.step_of(step).measured_peak_bytes
    print(f"recomputing alone needs {alone} bytes; measured {measured} of {budget}, {moved} moved to disk and back")
    assert measured <= budget < alone
    assert moved > 0


if __name__ == "__main__":
    main()
