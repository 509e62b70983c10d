"""Execute copies and sums.

host         copy blocks on the host
reduce       ordered sums, on the host and on GPUs
gpu          copy blocks in one kernel launch, or with torch
gpu_table    how one launch is divided among blocks
gpu_kernel   the Triton kernels
peer_memory  copy from and to the memory of another process
"""
