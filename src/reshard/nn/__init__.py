"""Shard the parameters of modules, and undo it."""
