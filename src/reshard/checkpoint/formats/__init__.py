"""Readers and writers of checkpoint formats; every reader produces a Catalog."""
