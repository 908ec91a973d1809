"""Keep, recompute or offload, chosen together."""
