"""A compiled training step: lower a rewritten graph, run it, measure it, and hold it to its budget."""
