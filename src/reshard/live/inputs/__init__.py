"""The arguments of a call: options, and tensors that are checked and bound to base addresses.

request  the arguments of one call: options and tensors
bound    its tensors by base number, and where they are
memory   overlaps are refused, padding is filled, donated sources are freed; huge pages
"""
