"""Where the bytes of a checkpoint live: a local folder, or anything fsspec reaches.

Local files are read with ``pread`` (mapped pages would count as memory of the process) and remote
ones by ranges. Every path is relative to the root and may not leave it.

>>> import tempfile, pathlib
>>> folder = tempfile.mkdtemp()
>>> _ = pathlib.Path(folder, "a.bin").write_bytes(b"0123456789")
>>> with open_storage(folder) as store:
...     store.list(), bytes(store.read("a.bin", 2, 3))
((StoredFile(path='a.bin', size=10),), b'234')
"""

from __future__ import annotations
