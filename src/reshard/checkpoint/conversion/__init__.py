"""Converts a checkpoint to another layout or format: request, source, plan, build.

stages   ``convert``, the stages in turn, and its report
request  the arguments; the layout and the dtype that they give every output tensor
names    the output tensors when names change
plan     all that is to be read, written and copied
build    runs the plan: checks the source, copies chunks, checks, seals and publishes the output
"""
