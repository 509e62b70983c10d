"""The common boxes (cells) of source and destination regions.

transfers  cells, what no rank holds, and runs of cells that go from rank to rank
regular    cells by arithmetic, for regular layouts
listed     all cells worked out once, for all other layouts; their lines of ranks, host by host
"""
