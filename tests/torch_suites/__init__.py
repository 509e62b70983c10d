"""PyTorch's own tests of sharded tensors and DTensors, run with torch and with reshard.

``__main__`` the command, ``adapting`` what is changed in the files, ``cpu_only`` and ``by_moves``
what they import first, ``running`` runs them and reads what came out.
"""
