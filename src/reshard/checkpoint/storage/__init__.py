"""Files of a checkpoint: read by byte ranges, local or remote, and written durably.

local         the interface of a storage, local folders and files, reserved file names
remote        files behind an fsspec address, read and uploaded
output_files  files that are written by ranges in any order; atomic and durable operations
"""
