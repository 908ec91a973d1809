"""Moving bytes between the device and its tiers while a step runs; nothing is decided here."""
