"""`python -m fxmem.cli`."""

from fxmem.cli import main

main()
