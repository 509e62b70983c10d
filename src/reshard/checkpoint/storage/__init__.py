"""Files of a checkpoint, read by byte ranges and written durably."""
