"""The compiled planner kernel: C sources and their typed Python faces."""
