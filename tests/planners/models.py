"""Hand-made training programs that are larger or more regular than random ones."""

from dataclasses import dataclass, field

import numpy as np

from fxmem.ir.program import Op, Program, Region, Storage

MIB = 2**20


@dataclass
class Builder:
    """Ops appended one by one; each owns its outputs."""

    ops: list[Op] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)

    def add(
        self, target: str, args: list[int], nbytes: int = 0, seconds: float = 0.0, region: Region = "forward"
    ) -> int:
        """One op with one output; returns its index."""
        storage = Storage(len(self.storages), nbytes)
        self.storages.append(storage)
        index = len(self.ops)
        self.ops.append(
            Op(
                index=index,
                name=f"{target}_{index}",
                target=target,
                region=region,
                args=tuple(dict.fromkeys(args)),
                storages=(storage.id,),
                is_input=target in ("input", "tangent"),
                seconds=seconds,
                recomputable=target not in ("input", "tangent", "dropout"),
            )
        )
        return index

    def build(self, name: str, forward_outputs: list[int], backward_outputs: list[int]) -> Program:
        return Program(
            name, tuple(self.ops), tuple(self.storages), tuple(forward_outputs), tuple(backward_outputs), (0,)
        )


LAYER = (("norm", 1.0, 0.1), ("linear", 4.0, 1.0), ("gelu", 4.0, 0.2), ("linear", 1.0, 1.0), ("add", 1.0, 0.1))


def blocks(num_blocks: int, width_bytes: int = MIB) -> Program:
    """Residual blocks (norm, linear, gelu, linear, add) in a row and their backward, which reads every op's input."""
    b = Builder()
    weight, x = b.add("input", [], 4 * MIB), b.add("input", [], width_bytes)
    trace: list[tuple[str, int, int]] = []
    for _ in range(num_blocks):
        block_input = x
        for target, width, seconds in LAYER:
            args = [x, block_input] if target == "add" else [x, weight] if target == "linear" else [x]
            trace.append((target, x, b.add(target, args, int(width * width_bytes), seconds)))
            x = trace[-1][2]
    loss = b.add("loss", [x], 4, 0.1)
    grad = b.add("tangent", [], 4, region="backward")
    grad = b.add("loss_backward", [grad, x], width_bytes, 0.1, "backward")
    returned = []
    for target, read, made in reversed(trace):
        if target == "add":
            continue
        nbytes = int(b.storages[b.ops[read].storages[0]].nbytes)
        grad = b.add(f"{target}_backward", [grad, read], nbytes, 2 * b.ops[made].seconds, "backward")
        if target == "linear":
            returned.append(b.add("weight_grad", [grad, read], width_bytes // 64, 0.5, "backward"))
    return b.build(f"{num_blocks} blocks", [loss], [*returned, grad])


def many_users(length: int) -> Program:
    """A chain whose every value is read by all later ops, forward and backward."""
    b = Builder()
    made = [b.add("input", [], 64)]
    for _ in range(length):
        made.append(b.add("op", made, MIB, 1.0))
    grad = b.add("tangent", [], 4, region="backward")
    for i in range(length, 0, -1):
        grad = b.add("op_backward", [grad, *made[: i + 1]], MIB, 1.0, "backward")
    return b.build("many users", [made[-1]], [grad])


def products() -> Program:
    """(a*c)*x + b*y + ((a*b)*c)*z and its gradient with respect to everything."""
    b = Builder()
    a, bb, c, x, y, z = (b.add("input", [], MIB) for _ in range(6))

    def mul(left: int, right: int, region: Region = "forward") -> int:
        return b.add("mul", [left, right], MIB, 1.0, region)

    ac, by, ab = mul(a, c), mul(bb, y), mul(a, bb)
    acx, abc = mul(ac, x), mul(ab, c)
    abcz = mul(abc, z)
    total = b.add("add", [b.add("add", [acx, by], MIB, 1.0), abcz], MIB, 1.0)
    g = b.add("tangent", [], MIB, region="backward")
    grad_abc = mul(g, z, "backward")
    grad_z = mul(g, abc, "backward")
    grad_ab = mul(grad_abc, c, "backward")
    grad_c = mul(grad_abc, ab, "backward")
    grad_x = mul(g, ac, "backward")
    grad_ac = mul(g, x, "backward")
    return b.build("products", [total], [grad_z, grad_ab, grad_c, grad_x, grad_ac])


def irregular(length: int, seed: int = 0) -> Program:
    """A chain with skips, its bytes and seconds drawn: bounds and plans hardly ever meet on it."""
    rng = np.random.default_rng(seed)
    b = Builder()
    made = [b.add("input", [], 64)]
    for _ in range(length):
        args = [made[-1], made[int(rng.integers(len(made)))]]
        made.append(b.add("op", args, int(rng.integers(1, 50)) * 1024, float(rng.integers(1, 9))))
    grad = b.add("tangent", [], 4, region="backward")
    for i in range(length, 0, -1):
        args = [grad, made[i - 1], made[int(rng.integers(i + 1))]]
        grad = b.add("op_backward", args, int(rng.integers(1, 20)) * 1024, 1.0, "backward")
    return b.build("irregular", [made[-1]], [grad])
