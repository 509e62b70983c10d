"""What a plan costs.

topology  which ranks share a host, and how fast links are
messages  which pairs of ranks exchange something in how many rounds
traffic   bytes and messages of ranks, and between groups of ranks
summary   the figures of a whole plan
"""
