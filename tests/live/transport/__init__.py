"""Tests of reshard.live.transport."""
