"""Checkpoints: what is in them, and how to cut them another way."""
