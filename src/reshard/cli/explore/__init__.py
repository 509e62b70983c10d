"""``reshard explore``: the page of a plan with fields, served to browsers of this machine.

command  the command and its options
answers  the fields: what they mean, and what is wrong with them
server   HTTP on the loopback address; every request is checked, and its work is bounded
"""
