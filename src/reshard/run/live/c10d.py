"""What the live engine uses of torch's stores and groups, by the names they are typed under.

torch.distributed offers the same classes, without telling type checkers so.
"""

from __future__ import annotations

from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, TCPStore, Work

__all__ = ["PrefixStore", "ProcessGroup", "Store", "TCPStore", "Work", "clone_of"]


def clone_of(store: Store) -> Store:
    """Another connection to the same store."""
    clone: Store = store.clone()  # type: ignore[attr-defined]  # torch does not tell its types
    return clone
