"""Loads and saves the tensors of a running job, on all ranks together.

- ``loading``: ``load``
- ``saving``: ``save``
- ``entries``: the entries of a state dict, and views of this rank's part of each tensor
- ``match``: the tensors of a job matched with those of a checkpoint
- ``summary``: the contents of a checkpoint, as JSON for the other ranks
- ``read_shares``: which rank reads which bytes
- ``direct_reads``: reads what only one rank needs into its tensors
- ``shared_reads``: reads what several ranks need
- ``scatter``: sends what was read to the ranks that need it
- ``write_shares``: which rank writes which box, and writes it
- ``reports``: the reports of a load and a save
"""
