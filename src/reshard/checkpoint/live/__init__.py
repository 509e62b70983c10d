"""Checkpoints inside a job: the ranks of a process group load and save together. Needs torch."""
