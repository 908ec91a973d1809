"""What runs a plan; it decides nothing."""
