"""The ranks of a move: the numbers of their calls, their connections, their control messages.

session        sets of ranks, and the numbers of their calls
rendezvous     connect all ranks of a session, or none
wait_graph     which rank waits for which, and deadlocks between sessions
listener       connect to the session's store, and the ranks of one host
mailbox        control messages over unix sockets
control        the control messages, causes of failures, tags of calls
shared_memory  buffers that processes map; abort flags, signals between GPUs
store          requests to stores, worker threads, a lock that survives exceptions
"""
