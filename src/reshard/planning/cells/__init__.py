"""The common boxes (cells) of source and destination regions.

geometry   cells, the lines along which ranks share the work on them, and what no rank holds
regular    cells by arithmetic, for regular layouts
listed     all cells worked out once, for all other layouts; their lines of ranks, host by host
transfers  runs of cells that go from rank to rank
"""
