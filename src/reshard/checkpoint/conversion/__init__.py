"""Converts a checkpoint to another layout or format: request, source, plan, build.

- ``stages``: ``convert``, the four stages in turn
- ``request``: stage 1, the arguments
- ``source``: stage 2, the state of the source, and checks of its bytes outside of tensors
- ``plan``: stage 3, all that is to be done
- ``build``: stage 4, prepares files, copies chunks, checks and seals the output
- ``layouts``: the layout and the dtype of every output tensor
- ``names``: the output tensors when names change
- ``processes``: several processes that convert together
- ``report``: the report of a conversion
"""
