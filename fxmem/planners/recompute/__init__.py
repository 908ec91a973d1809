"""Which storages to keep and which to recompute: cuts, eviction, moments, bounds, search, simple planners."""
