"""A documentation and keyword index of a source tree, as Markdown pages and JSON records.

    from reshard.index import build
    print(build("src", "index"))

records  what one Python or Markdown file defines, imports and mentions
pages    the documentation page and the keyword page of one file
tree     all files of a tree: who imports whom, folders, an A to Z of all keywords with search

The standard library is all that it needs. Nothing of the tree is imported or run.
"""

from reshard.index.tree import IndexReport, build

__all__ = ["IndexReport", "build"]
