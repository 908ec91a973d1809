"""Public tools to test FX passes and planners."""
