"""Shard the tensors of a module by a plan, swap modules, change outputs; and undo all of it.

plan      ShardingPlan: what of a module is sharded, and how; which tensors its paths name
module    shard_module and shard_parameter: all of the plan or nothing; ShardHandle undoes it
outputs   forward hooks that reshard sharded outputs or make them local
paths     modules, parameters and buffers by path and pattern
"""
