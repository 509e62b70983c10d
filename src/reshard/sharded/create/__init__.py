"""Contents of new sharded tensors.

factories      every rank fills its own shards
local_shards   from shards that the ranks already have
scatter        from plain tensors: one rank has the values, and each rank gets its shards
"""
