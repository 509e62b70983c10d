"""The tensors that a rank brings to a call, checked and bound to addresses.

request   what a rank was given: tensors, destinations, group, options
bound     tensors by base number, and their addresses
overlap   refuse destinations that overlap
devices   from GPU to GPU, or by way of the hosts?
huge_pages  for large tensors that are moved again and again
finish    zeros where nothing comes, donated sources
streams   side streams of a move that runs in a thread
"""
