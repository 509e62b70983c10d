"""Describes what a checkpoint holds, without reading any tensor."""
