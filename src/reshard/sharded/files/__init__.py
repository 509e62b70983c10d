"""Sharded tensors in files and state dicts.

pickles            torch.save and torch.load of one rank's shards; load_files on any ranks
state_dicts        get_model_state_dict and the functions beside it; state dict hooks
torch_checkpoint   torch.distributed.checkpoint
"""
