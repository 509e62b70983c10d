"""Run a plan live: between processes, over shared memory, the network or NCCL."""
