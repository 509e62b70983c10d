"""Run a plan between the processes of a torch.distributed job.

    api         entry points: run, start, release, check
    call        one call on one rank, from its number to its result
    compiled    what is compiled from a plan and kept on it
    handle      what `plan.start` returns
    options     how a plan is run
    report      what a run did; ``trace`` draws it, ``progress`` shows it while it runs
    inputs/     the tensors of a call: checked, with addresses
    program/    a rank's part of a plan as blocks with addresses; numpy only
    copy/       execute copies and sums, on the host and on GPUs
    session/    the ranks of a move: call numbers, connections, control messages
    failure/    waits that end, causes that all ranks learn
    transport/  how messages get from one rank to another

Imports go one way: api | handle > call > transport > failure > session | inputs > copy > program.
"""
