"""Tests of reshard.live.inputs."""
