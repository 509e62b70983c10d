"""Shard the tensors of a module by a plan, swap modules, change outputs; and undo all of it.

plan      ShardingPlan: what of a module is sharded, and how
module    shard_module and shard_parameter: all of the plan or nothing
handle    ShardHandle: what undoes it
outputs   forward hooks that reshard sharded outputs or make them local
resolve   which tensors and modules the paths of a plan name, and whether the plan is consistent
paths     modules, parameters and buffers by path and pattern
"""
