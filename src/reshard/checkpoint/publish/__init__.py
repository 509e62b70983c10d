"""Builds an output in a temporary folder, resumably, and publishes it in one step."""
