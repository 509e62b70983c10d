"""What a plan costs.

topology  which ranks share a host, and how fast links are
messages  which pairs of ranks exchange something in how many rounds
summary   bytes and messages of ranks and links, and the figures of a whole plan
"""
