"""Which of the model's modules a node belongs to, by the path that `named_modules` would give."""

from __future__ import annotations

import re

from torch import fx

_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_ROOT = re.compile(r"^[LG]\[['\"](\w+)['\"]\](?:\.__self__)?")
_KEY = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]")
_HOLDERS = re.compile(r"\._modules(?=\.|$)")


def module_of(node: fx.Node) -> str:
    """Path of the innermost module whose forward `node` is a part of, or the backward of; "" of the model's own.

    Torch notes Dynamo's source of it, such as ``L['self']._modules['layers']._modules['0']``: here "layers.0".
    """
    for key in _STACKS:
        stack = node.meta.get(key)
        if stack:
            source = str(next(reversed(stack.values()))[0])
            return _HOLDERS.sub("", _KEY.sub(r".\1", _ROOT.sub("", source))).strip(".")
    return ""
