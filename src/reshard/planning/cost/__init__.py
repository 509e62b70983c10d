"""What a plan costs.

topology  which ranks share a host, and how fast links are
traffic   bytes and messages between every two ranks
summary   the figures of a whole plan
"""
