"""Partitioners: each turns a chain, a cluster and a number of microbatches into a simulated plan."""
