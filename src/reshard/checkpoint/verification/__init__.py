"""Verifies one checkpoint in full, and compares two tensor by tensor."""
