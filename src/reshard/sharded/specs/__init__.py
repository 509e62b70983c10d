"""How a tensor is split into shards, and which rank holds each: specs and their layouts.

base       ShardingSpec, the base class, and checks of placements and dims
coverage   checks that shards do not overlap and cover a tensor
grids      specs that split dims: chunks, sizes, grids
listed     specs that list shards or name a layout; the spec that given shards follow
lowering   from a spec, or from shards, to the content of this rank
"""
