"""Tests of layouts read from torch's tensors, on ranks of a fake process group."""
