"""One rank's part of a plan as blocks with addresses; numpy only.

blocks   rows of a plan as blocks, and their offsets in a local tensor
copies   `CopyBlocks`: the one description of strided copies
runs     contiguous runs, and the system calls that copy between two lists of them
rounds   transfers by round and peer
modes    how a transfer travels (staged, read or write), and the layout of a message
"""
