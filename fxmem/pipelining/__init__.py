"""Pipeline planning: chains of blocks, schedules, the simulator of P devices, and the partitioners."""
