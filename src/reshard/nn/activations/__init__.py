"""Keep saved activations that are identical on all ranks as shares, and restore them in backward.

api         input_reshard and its relatives, their handle, the forward that replaces a module's
policy      how each saved tensor is kept: whole, as a share, or on the host; budget and hooks
replicated  which saved tensors are identical on all ranks, and which are parameters
restore     all-gather of shares, batched and prefetched
region      the memory that is kept, and the saved tensors that are views of it
"""
