"""The tensors that a rank gives to a call, checked and bound to base addresses.

huge_pages  for large tensors that are moved repeatedly
overlap     refuse destinations that overlap
bound       the request of a call, its tensors by base number, and where they are
finish      zeros in padding, the release of donated sources
streams     side streams of a move that runs in a thread
"""
