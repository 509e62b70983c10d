"""Tests of reshard.live.program."""
