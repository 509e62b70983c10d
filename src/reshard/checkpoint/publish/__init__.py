"""Publishes an output in one step, after it was built in a temporary folder.

workplace  the temporary folder, its lock, and the exchange with the destination
journal    the chunks that are done, for a conversion that is resumed; processes that work together
replacing  the files that belong to an old checkpoint, and those that are kept
"""
