"""Transports carry messages between ranks, and the executor runs the rounds of a call on them.

base         the interface of a transport, and the executor of the rounds: read this first
host         ranks of one host, through shared memory and the memory of the other process
gloo         ranks of different hosts
gloo_group   a gloo group of the session's own
gpu_routes   which way data goes between GPUs, for every pair of ranks
gpu_peer     GPUs of one host, which read each other's memory
gpu_pulls    what a rank reads of its peers, compiled
gpu_memory   device memory that processes share, and signals between their GPUs
nccl         GPUs, with NCCL
nccl_group   a NCCL group of the session's own
in_flight    GPU work that is in flight when its call has returned
"""
