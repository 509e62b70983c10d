"""The common boxes (cells) of source and destination regions.

geometry  cells, and the lines along which ranks share the work on them
regular   cells by arithmetic, for regular layouts
listed    all cells worked out once, for all other layouts
coverage  does the source hold everything that the destination wants?
"""
