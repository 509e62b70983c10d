"""Sharded tensors in files and state dicts.

pickles            torch.save and torch.load of one rank's shards; load_files on any ranks
torch_checkpoint   torch.distributed.checkpoint, get_model_state_dict, state dict hooks
"""
