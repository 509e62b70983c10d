"""Files written by torch.save and torch.distributed.checkpoint, read and written without torch."""
