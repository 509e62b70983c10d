"""Tests of reshard.live.copy."""
