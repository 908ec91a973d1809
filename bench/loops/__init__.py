"""Training loops as people write them; `python -m bench.loops` runs them under a budget."""
