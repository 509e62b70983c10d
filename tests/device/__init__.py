"""Tests on a GPU. They need only torch and numpy, so that they also run where pytest is missing:

PYTHONPATH=src python3 -m tests.device.run
"""
