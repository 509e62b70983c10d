"""Files that hold the local tensors of one rank each."""
