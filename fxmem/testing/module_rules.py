"""What a drawn module may say: each rule writes a few statements about one value.

A rule must leave a module that eager autograd accepts: it edits in place only what it has just made, and never what an
earlier op saved for its backward.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fxmem.testing.module_builder import Builder, Rule

MAX_ELEMENTS = 512  # of a value that a rule may make larger


RULES: list[Rule] = []
INPUTS: list[Rule] = []


def _rule(
    feature: str, where: Callable[[Tensor], bool] = lambda t: True
) -> Callable[[Callable[[Builder, str], object]], Callable[[Builder, str], object]]:
    def add(write: Callable[[Builder, str], object]) -> Callable[[Builder, str], object]:
        RULES.append(Rule(feature, where, write))
        return write

    return add


def _say(feature: str, where: Callable[[Tensor], bool], *expressions: str) -> None:
    """A rule whose result is one of `expressions`, in which {v} is the value."""
    RULES.append(Rule(feature, where, lambda b, v: b.let(b.choose(*expressions).format(v=v))))


def _input(feature: str) -> Callable[[Callable[[Builder], object]], Callable[[Builder], object]]:
    def add(write: Callable[[Builder], object]) -> Callable[[Builder], object]:
        INPUTS.append(Rule(feature, lambda t: True, lambda b, _: write(b), needs_value=False))
        return write

    return add


def _any(t: Tensor) -> bool:
    return True


def _full(t: Tensor) -> bool:
    return t.numel() > 0


def _vector(t: Tensor) -> bool:
    return t.ndim >= 1 and _full(t)


def _matrix(t: Tensor) -> bool:
    return t.ndim >= 2 and _full(t)


def _image(t: Tensor) -> bool:
    return t.ndim == 4 and _full(t) and min(t.shape[2:]) >= 2


def _may_grow(t: Tensor) -> bool:
    return t.ndim >= 1 and t.ndim < 5 and t.numel() <= MAX_ELEMENTS


# arguments


@_input("inputs")
def _matrix_input(b: Builder) -> None:
    shape = f"{b.choose(2, 1, 3, 4)}, {b.choose(4, 1, 2, 6, 8)}"
    b.argument(f"torch.randn({shape}{b.dtype}{b.choose(', requires_grad=True', '')})")


@_input("inputs")
def _sequence_input(b: Builder) -> None:
    shape = f"{b.choose(2, 1)}, {b.choose(3, 1, 4)}, {b.choose(4, 2, 8)}"
    b.argument(f"torch.randn({shape}{b.dtype}{b.choose(', requires_grad=True', '')})")


@_input("inputs")
def _image_input(b: Builder) -> None:
    shape = f"{b.choose(2, 1)}, {b.choose(2, 4, 3)}, {b.choose(4, 3)}, {b.choose(4, 5)}"
    b.argument(f"torch.randn({shape}{b.dtype}{b.choose('', ', requires_grad=True')})")


@_input("strided inputs")
def _strided_input(b: Builder) -> None:
    odd = b.choose("torch.randn(4, 3{d}).t()", "torch.randn(3, 8{d})[:, ::2]", "torch.randn(1, 4{d}).expand(3, 4)")
    b.argument(odd.format(d=b.dtype) + b.choose("", ".requires_grad_()"))


@_input("scalars")
def _scalar_input(b: Builder) -> None:
    b.argument(f"torch.randn((){b.dtype}{b.choose(', requires_grad=True', '')})")


@_input("empty tensors")
def _empty_input(b: Builder) -> None:
    b.argument(f"torch.randn(0, {b.choose(4, 1)}{b.dtype}{b.choose(', requires_grad=True', '')})")


@_input("integers")
def _token_input(b: Builder) -> None:
    num, width = b.choose(5, 2), b.choose(4, 2, 8)
    tokens = b.argument(f"torch.randint(0, {num}, ({b.choose(2, 1)}, {b.choose(3, 1, 4)}))")
    b.let(f"{b.layer('embedding', f'nn.Embedding({num}, {width}{b.dtype})')}({tokens})")


# one value in, one out

_say("pointwise", _any, "{v}.tanh()", "{v}.sigmoid()", "{v} * 0.5", "{v} + 1", "F.gelu({v})", "F.silu({v})",
     "F.relu({v})", "{v}.sin()", "{v}.abs()", "F.softplus({v})", "{v}.square()", "{v}.neg()")  # fmt: skip
_say("reductions", _vector, "{v}.sum()", "{v}.mean(-1)", "{v}.sum(0, keepdim=True)", "{v}.amax(-1, keepdim=True)",
     "{v}.max(-1).values", "{v}.cumsum(-1)", "F.softmax({v}, -1)", "{v}.log_softmax(0)",
     "{v}.logsumexp(-1)")  # fmt: skip
_say("reductions", _any, "{v}.sum()", "{v}.pow(2).sum()")
_say("indexing", _matrix, "{v}.sort(-1).values", "{v}.topk(1, -1).values", "{v}.flip(0)", "{v}.roll(1, -1)",
     "{v}[torch.zeros(2, dtype=torch.long)]", "{v}.index_select(-1, torch.zeros(3, dtype=torch.long))",
     "{v}.take_along_dim({v}.argmax(-1, keepdim=True), -1)", "{v}.tril()")  # fmt: skip
_say("views", _vector, "{v}.unsqueeze(0)", "{v}.flatten()", "{v}.reshape(-1)", "{v}[..., ::2]", "{v}[0]",
     "{v}[..., -1]", "{v}.narrow(-1, 0, 1)", "{v}.unbind(-1)[0]", "{v}.chunk(2, -1)[0]", "{v}.detach()")  # fmt: skip
_say("views", _matrix, "{v}.transpose(0, 1)", "{v}.transpose(-1, -2)", "{v}.mT.contiguous()", "{v}.movedim(0, -1)",
     "{v}.diagonal()", "{v}[1:, :1]", "{v}.transpose(0, 1).flatten(0, 1)", "{v}.transpose(-1, -2).clone()")  # fmt: skip
_say("views", _may_grow, "{v}.expand(2, *{v}.shape)", "{v}.unsqueeze(-1).expand(*{v}.shape, 2)",
     "{v}.repeat(2, *[1] * ({v}.ndim - 1))")  # fmt: skip
_say("random", _any, "F.dropout({v}, 0.5)", "F.dropout({v}, 0.1)", "{v} + torch.rand_like({v})",
     "{v} * torch.bernoulli({v}.detach().sigmoid())", "F.dropout({v}.tanh(), 0.3).exp()")  # fmt: skip
_say("casts", _any, "{v}.double().sin().to({v}.dtype)", "{v} * ({v} > 0)", "torch.where({v} > 0, {v}, 0.1 * {v})")
_say("images", _image, "F.max_pool2d({v}, 2)", "F.avg_pool2d({v}, 2)", "F.pad({v}, (1, 0, 0, 1))",
     "{v}.contiguous(memory_format=torch.channels_last)", "F.interpolate({v}, scale_factor=2)")  # fmt: skip


# two values


@_rule("pointwise")
def _binary(b: Builder, v: str) -> None:
    other = b.pick(lambda t: t.shape == b.values[v].shape)
    b.let(b.choose("{v} + {u}", "{v} * {u}", "{v} - 2 * {u}", "torch.maximum({v}, {u})").format(v=v, u=other))


@_rule("pointwise")
def _with_scalar(b: Builder, v: str) -> None:
    b.let(f"{v} * {b.pick(_any)}.sum().tanh()")


@_rule("concatenation", _may_grow)
def _concatenated(b: Builder, v: str) -> None:
    other = b.pick(lambda t: t.shape == b.values[v].shape)
    joined = b.choose("torch.cat([{v}, {u}], -1)", "torch.cat([{v}, {u}, {v}])", "torch.stack([{v}, {u}])")
    b.let(joined.format(v=v, u=other))


@_rule("pointwise", _matrix)
def _matmul(b: Builder, v: str) -> None:
    b.let(f"{v} @ {v}.mT")


# layers


def _rows(t: Tensor) -> bool:
    return t.ndim >= 2 and t.shape[-1] > 0


@_rule("linear", _rows)
def _linear(b: Builder, v: str) -> None:
    width = b.choose(4, 2, 8, 1, 6)
    bias = b.choose("", ", bias=False")
    layer = b.layer("linear", f"nn.Linear({b.values[v].shape[-1]}, {width}{bias}{b.dtype})")
    b.linears.append(layer)
    b.let(f"{layer}({v})")


@_rule("residuals", _rows)
def _residual(b: Builder, v: str) -> None:
    width = b.values[v].shape[-1]
    norm = b.layer("norm", f"nn.LayerNorm({width}{b.dtype})")
    first, second = (b.layer("linear", f"nn.Linear({width}, {width}{b.dtype})") for _ in range(2))
    b.let(f"{v} + {second}(F.gelu({first}({norm}({v}))))")


@_rule("norms", lambda t: _matrix(t) and t.numel() > t.shape[-1])
def _norm(b: Builder, v: str) -> None:
    shape = b.values[v].shape
    groups = 2 if shape[1] % 2 == 0 else 1
    choices = [f"nn.LayerNorm({shape[-1]}{b.dtype})"]
    if shape.numel() > groups * shape[0]:
        choices.append(f"nn.GroupNorm({groups}, {shape[1]}{b.dtype})")
    if shape.numel() > shape[1] and len(shape) in (2, 3, 4):
        choices.append(f"nn.BatchNorm{2 if len(shape) == 4 else 1}d({shape[1]}{b.dtype})")
    b.let(f"{b.layer('norm', b.choose(*choices))}({v})")


@_rule("convolutions", _image)
def _convolution(b: Builder, v: str) -> None:
    channels = b.values[v].shape[1]
    options = b.choose("3, padding=1", "2", "1, bias=False", "3, padding=1, stride=2")
    b.let(f"{b.layer('conv', f'nn.Conv2d({channels}, {b.choose(4, 2, 3)}, {options}{b.dtype})')}({v})")


@_rule("convolutions", lambda t: t.ndim == 3 and _full(t) and t.shape[2] >= 2)
def _convolution_1d(b: Builder, v: str) -> None:
    b.let(f"{b.layer('conv', f'nn.Conv1d({b.values[v].shape[1]}, {b.choose(4, 2)}, 2{b.dtype})')}({v})")


@_rule("attention", lambda t: t.ndim == 3 and _full(t) and t.shape[-1] % 2 == 0)
def _attention(b: Builder, v: str) -> None:
    batch, length, width = b.values[v].shape
    qkv = b.let(f"{b.layer('qkv', f'nn.Linear({width}, {3 * width}{b.dtype})')}({v})")
    head = f".unflatten(-1, (2, {width // 2})).transpose(1, 2)"
    heads = [b.let(f"{qkv}[..., {i * width}:{(i + 1) * width}]{head}") for i in range(3)]
    causal = b.choose("", ", is_causal=True", ", dropout_p=0.2")
    if "random" in b.without and "dropout" in causal:
        causal = ""
    mixed = b.let(f"F.scaled_dot_product_attention({', '.join(heads)}{causal})")
    b.let(f"{mixed}.transpose(1, 2).reshape({batch}, {length}, {width})")


@_rule("tied weights", _rows)
def _tied(b: Builder, v: str) -> None:
    width = b.values[v].shape[-1]
    same = [name for name in b.linears if b.module.get_submodule(name.removeprefix("self.")).in_features == width]
    if not same:
        layer = b.layer("linear", f"nn.Linear({width}, {width}, bias=False{b.dtype})")
        b.linears.append(layer)
        b.let(f"{layer}({layer}({v}).tanh())")
    else:
        weight = f"{b.choose(*same)}.weight"
        b.let(f"F.linear({v}, {weight}).tanh() @ {weight}")


@_rule("integers", _matrix)
def _looked_up(b: Builder, v: str) -> None:
    table = b.layer("embedding", f"nn.Embedding({b.values[v].shape[-1]}, 4{b.dtype})")
    b.let(f"{table}({v}.argmax(-1))")


# state


@_rule("buffers")
def _counted(b: Builder, v: str) -> None:
    """Read before its update: whoever reads it again later reads another value."""
    buffer = b.buffer(f"torch.full((), 0.5{b.dtype})")
    b.let(f"{v} * {buffer}.cos()")
    b.do(f"{buffer}.add_(1)")


@_rule("buffers", _vector)
def _running_mean(b: Builder, v: str) -> None:
    buffer = b.buffer(f"torch.zeros({tuple(b.values[v].shape)}{b.dtype})")
    b.do(f"{buffer}.mul_(0.9).add_({v}.detach(), alpha=0.1)")
    b.let(f"{v} - {buffer}.sin()")


@_rule("buffers")
def _frozen(b: Builder, v: str) -> None:
    weight = b.layer("weight", f"nn.Parameter(torch.randn({tuple(b.values[v].shape)}{b.dtype}), requires_grad=False)")
    b.let(f"{v} * {weight}.tanh()")


@_rule("overwritten inputs")
def _overwritten(b: Builder, v: str) -> None:
    state = b.argument(f"torch.ones({tuple(b.values[v].shape)}{b.dtype})")
    b.let(f"{v} * {state}.sin()")
    b.do(f"{state}.{b.choose('add_(1)', f'copy_({v}.detach())', 'mul_(0.5)')}")
    del b.values[state]  # read again and saved, it would not be what autograd saved


# in place


@_rule("in-place ops")
def _edited(b: Builder, v: str) -> None:
    made = b.let(f"{v} + 0.5")
    b.do(f"{made}.{b.choose('mul_(0.5)', 'neg_()', 'tanh_()', 'add_(1)')}")


@_rule("in-place ops")
def _accumulated(b: Builder, v: str) -> None:
    made = b.let(f"torch.zeros_like({v})")
    for _ in range(b.choose(1, 2, 3)):
        b.do(f"{made}.add_({b.pick(lambda t: t.shape == b.values[v].shape and t is not b.values[made])}, alpha=0.5)")


@_rule("in-place ops", _vector)
def _edited_through_a_view(b: Builder, v: str) -> None:
    made = b.let(f"{v} * 1.5")
    view = b.choose("[..., :1]", "[0]", ".flatten()[:2]", ".unsqueeze(0)", "[..., ::2]")
    b.do(f"{made}{view}.{b.choose('mul_(2)', 'add_(1)', 'zero_()', 'sub_(0.5)')}")


@_rule("in-place ops", lambda t: _vector(t) and t.shape[0] <= 4)
def _filled_row_by_row(b: Builder, v: str) -> None:
    made = b.let(f"torch.empty_like({v}).fill_(0.1)")
    b.do(f"for i in range({made}.shape[0]): {made}[i] = {v}[i] * i")


# custom functions

CLASSES = {
    "Cubed": '''
        class Cubed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x * x

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                return grad * 3 * x * x
    ''',
    "Clipped": '''
        class Clipped(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, limit):
                ctx.limit = limit
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return grad.clamp(-ctx.limit, ctx.limit), None
    ''',
    "Both": '''
        class Both(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                y = x.tanh()
                ctx.save_for_backward(y)
                return y, x + y

            @staticmethod
            def backward(ctx, one, other):
                (y,) = ctx.saved_tensors
                return one * (1 - y * y) + other * (2 - y * y)
    ''',
}


@_rule("custom functions")
def _custom(b: Builder, v: str) -> None:
    call = b.choose("Cubed.apply({v})", "Clipped.apply({v}, 0.1)", "Both.apply({v})[1]", "sum(Both.apply({v}))")
    name = call.replace("sum(", "").split(".")[0]
    b.define(name, CLASSES[name])
    b.let(call.format(v=v))
