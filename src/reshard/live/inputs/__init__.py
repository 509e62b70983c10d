"""The arguments of a call: options, and tensors that are checked and bound to base addresses.

request  the arguments of one call: options and tensors
bound    its tensors by base number, and where they are
overlap  refuse destinations that overlap
finish   zeros in padding, the release of donated sources
"""
