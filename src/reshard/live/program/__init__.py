"""One rank's part of a plan as blocks with addresses; numpy only.

blocks    rows of a plan as blocks, and `CopyBlocks`, the one description of strided copies
rounds    transfers by round and peer
messages  how a transfer travels (staged, read or write), and the layout of a message
"""
