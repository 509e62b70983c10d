"""Describes what a checkpoint holds, from headers alone.

- ``inspecting``: ``inspect`` and its report
- ``layouts``: the layout that the boxes of a tensor follow
- ``text``: the report as a table or a tree
"""
