"""A documentation and keyword index of a source tree, as Markdown pages and JSON records.

    from reshard.index import build
    print(build("src", "index"))

records  what one Python or Markdown file defines, imports and mentions
tree     all files of a tree as pages: who imports whom, folders, an A to Z of keywords, search

The standard library is all that it needs. Nothing of the tree is imported or run.
"""

from reshard.index.tree import IndexReport, build

__all__ = ["IndexReport", "build"]
