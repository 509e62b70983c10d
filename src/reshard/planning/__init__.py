"""Plans: who sends which box to whom, in which round, at what cost; and the proof.

stacks      tensors that are cut alike are planned once
cells       where a source region and a destination region meet
geometry    cells by rank: by arithmetic (open) or listed once
balance     who of several holders sends how much
lines       work shared along a line of elements
flow        cells become transfers, and transfers are passed on
rounds      what moves when, so that memory stays under the cap
rank        one rank's part
summary     what it costs
proof       why it is right
"""
