"""From a model to joint forward/backward graphs of ATen ops: inside `torch.compile`, or ahead of time."""

import fxmem.capture.sequential  # noqa: F401 - what Dynamo reads in place of torch's own
from fxmem.capture.ahead import capture
from fxmem.capture.backend import Partition, boxed, make_backend
from fxmem.capture.joint import JointGraph

__all__ = ["JointGraph", "Partition", "boxed", "capture", "make_backend"]
