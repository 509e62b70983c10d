"""How a tensor is split into shards, and which rank holds each: specs and their layouts.

base       ShardingSpec, the base class, and checks of placements and dims
grids      specs that split dims: chunks, sizes, grids
listed     specs that list shards or name a layout; the contents that specs and shards give a rank
"""
