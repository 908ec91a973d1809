"""Reports of a plan."""
