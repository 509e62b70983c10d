"""The ranks of a move: who they are, how they are connected, which call meets which.

session        sets of ranks, and the numbers of their calls
rendezvous     connect all ranks of a session, or none
connections    this rank's connections to the others
store          the session's store, and a client that never hangs
listener       connect the ranks of one host
mailbox        control messages over unix sockets
control        the control messages
shared_memory  buffers that two processes map; abort flags
cause, tags    why a call failed; user-given names of calls
worker         worker threads and an interrupt-safe lock
"""
