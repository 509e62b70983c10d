"""Execute copies and sums on the host and on GPUs.

host         copy blocks on the host, and from and to the memory of another process
gpu_table    divide one kernel launch among blocks
gpu_kernel   the Triton kernels
cuda_driver  calls of the CUDA driver: memory of other processes, signals
gpu          copy blocks between tensors on any device
reduce       ordered sums, on the host and on GPUs
"""
