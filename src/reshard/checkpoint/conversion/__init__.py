"""Converts a checkpoint to another layout or format: request, source, plan, build."""
