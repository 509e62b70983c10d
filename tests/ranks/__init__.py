"""Tests that need several processes: one pool of gloo ranks, shared by all of them."""
