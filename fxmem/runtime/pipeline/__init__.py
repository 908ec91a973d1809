"""Stages of a planned model on torch.distributed.pipelining; nothing is decided here."""
