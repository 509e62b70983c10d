"""Converts a checkpoint to another layout or format: request, plan, build.

stages   ``convert``, the stages in turn, and its report
plan     the request, and all that is to be done
layouts  the layout and the dtype of every output tensor
names    the output tensors when names change
build    checks the source, prepares files, copies chunks, checks and seals the output
"""
