"""fxmem: a memory-aware training compiler for PyTorch."""
