"""Graph passes: each applies one part of a plan to the joint graph as FX nodes."""
