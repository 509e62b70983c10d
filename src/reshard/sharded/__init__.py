"""Sharded tensors: a tensor of which every rank holds some shards, and how it is cut."""
