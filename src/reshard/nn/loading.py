"""On which process group do sharded tensors come to life when a file is loaded?

The answer belongs to the tensors; here it has the name that users of modules look for.
"""

from __future__ import annotations

from reshard.sharded.loading import current_process_group, load_with_process_group

__all__ = ["current_process_group", "load_with_process_group"]
