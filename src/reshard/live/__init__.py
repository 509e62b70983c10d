"""Run a plan between the processes of a torch.distributed job.

    api         entry points: handles, checks, release
    call        one call on one rank, from its number to its result
    gather      a few bytes of every rank, exchanged without a plan
    compiled    what one rank compiles from a plan and keeps between calls
    inputs/     the arguments of a call: options, and tensors with addresses
    program/    a rank's part of a plan as blocks with addresses; numpy only
    copy/       execute copies and sums, on the host and on GPUs
    session/    the ranks of a move: call numbers, connections, control messages
    failure/    waits that end, causes that all ranks raise
    transport/  how messages get from one rank to another

Imports go one way: api > call | gather > compiled > transport > failure > inputs > session > copy
> program.
The report of a run is `reshard.show.run_report`.
"""
