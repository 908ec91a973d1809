"""Analyses: read-only facts about a program."""
