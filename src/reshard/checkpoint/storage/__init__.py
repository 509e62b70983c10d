"""Files of a checkpoint: read by byte ranges, local or remote, and written durably.

base          the interface of a storage, and reserved file names
local         local folders and files; ``open_storage``
remote        files behind an fsspec address
open_files    a bounded set of open files, for reading and writing
output_files  files that are written by ranges in any order
direct        writes that bypass the page cache
durable       atomic replacement, exchange of folders, fsync of folders
"""
