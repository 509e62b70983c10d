"""A rank's part of a plan as blocks with addresses; numpy only.

rounds   transfers, sorted by round and peer
blocks   rows of a plan as blocks, and where they are in a local tensor
copies   `CopyBlocks`: the one description of strided copies
modes    staged, read or write; the layout of a message
runs     contiguous runs, and the system calls that copy between two lists of them
memory   memory of this process as arrays
"""
