"""The model zoo lives in the package, where benchmarks and the demo use it too."""

from fxmem.testing.zoo import NAMES, build

__all__ = ["NAMES", "build"]
