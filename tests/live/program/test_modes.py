"""How transfers travel: staged, read by the receiver or written by the sender."""

from __future__ import annotations

import pytest

import reshard as rs
from reshard.live.program.messages import GLOO, HOST, NCCL, Mode, Policy
from reshard.live.program.rounds import Program, Transfer

TWO = rs.Mesh(tp=2)
ROWS, COLUMNS, WHOLE = (rs.Layout(TWO, words) for words in ("tp -", "- tp", "- -"))
DIRECT = Policy(eager_bytes=-1)


def sent(have: rs.Layout, want: rs.Layout, shape: tuple[int, ...], dtype: str) -> Transfer:
    """What rank 0 sends to rank 1."""
    plan = rs.plan(have, want, shape=shape, dtype=dtype)
    (transfer,) = Program(plan, 0, {}).round(0).sends[1]
    return transfer


@pytest.mark.parametrize(
    ("have", "want", "mode"),
    [(ROWS, COLUMNS, Mode.WRITE), (COLUMNS, ROWS, Mode.READ), (ROWS, WHOLE, Mode.READ)],
    ids=["gaps in the source", "gaps in the destination", "no gaps"],
)
def test_the_process_with_gaps_makes_the_system_call(
    have: rs.Layout, want: rs.Layout, mode: Mode
) -> None:
    """A run in the memory of another process costs more than one in the own memory."""
    transfer = sent(have, want, (2048, 2048), "float32")
    assert DIRECT.mode(transfer, transfer.num_bytes) is mode


def test_short_runs_on_both_sides_are_staged() -> None:
    transfer = sent(rs.Layout(TWO, "- tp:1"), rs.Layout(TWO, "- tp:2"), (512, 512), "int8")
    assert DIRECT.mode(transfer, transfer.num_bytes) is Mode.STAGED


def test_a_message_is_eager_up_to_a_size() -> None:
    transfer = sent(ROWS, WHOLE, (2048, 2048), "float32")
    assert transfer.num_bytes == 8 << 20
    assert HOST.mode(transfer, HOST.eager_bytes) is Mode.STAGED
    assert HOST.mode(transfer, HOST.eager_bytes + 1) is Mode.READ
    message = HOST.message(1, [transfer], direct=True)
    assert (message.reads, message.staged_bytes, message.is_eager) == ([transfer], 0, True)
    message = HOST.message(1, [transfer], direct=False)
    assert (message.reads, message.staged_bytes, message.is_eager) == ([], 8 << 20, True)


@pytest.mark.parametrize(("words", "equal"), [("- -", True), ("- tp", False)])
def test_messages_of_the_same_bytes_have_the_same_content(words: str, equal: bool) -> None:
    """The host transport packs them once."""
    mesh = rs.Mesh(tp=3)
    plan = rs.plan(rs.Layout(mesh, "tp -"), rs.Layout(mesh, words), shape=(6, 6), dtype="float32")
    sends = Program(plan, 0, {}).round(0).sends
    one, other = (HOST.message(peer, transfers, direct=True) for peer, transfers in sends.items())
    assert (one.content == other.content) is equal


@pytest.mark.parametrize("policy", [GLOO, NCCL], ids=["gloo", "nccl"])
def test_over_a_network_large_blocks_without_gaps_go_directly(policy: Policy) -> None:
    for num_bytes, mode in (
        (policy.block_bytes, Mode.WRITE),
        (policy.block_bytes - 1, Mode.STAGED),
    ):
        transfer = sent(rs.Layout(TWO, "tp"), rs.Layout(TWO, "-"), (2 * num_bytes,), "int8")
        assert policy.mode(transfer, num_bytes) is mode
    transfer = sent(ROWS, COLUMNS, (2048, 2048), "float32")
    assert policy.mode(transfer, transfer.num_bytes) is Mode.STAGED


def test_what_is_cast_is_staged() -> None:
    have, want = (
        {"w": rs.TensorSpec((2048, 2048), dtype, layout)}
        for dtype, layout in (("float32", ROWS), ("bfloat16", WHOLE))
    )
    for one in Program(rs.plan(have, want), 0, {}).round(0).sends[1]:
        assert DIRECT.mode(one, one.num_bytes) is Mode.STAGED


def test_staged_transfers_follow_one_another_and_are_aligned() -> None:
    sizes = {"a": ("int8", 3), "b": ("float64", 5), "c": ("int16", 1)}
    have, want = (
        {
            name: rs.TensorSpec((2 * size,), dtype, rs.Layout(TWO, words))
            for name, (dtype, size) in sizes.items()
        }
        for words in ("tp", "-")
    )
    transfers = Program(rs.plan(have, want), 0, {}).round(0).sends[1]
    message = HOST.message(1, transfers, direct=True)
    lengths = [transfer.num_bytes for transfer, _ in message.staged]
    assert sorted(lengths) == [2, 3, 40]
    assert [at for _, at in message.staged] == [sum(lengths[:n]) for n in range(3)]
    assert (message.staged_bytes, message.alignment) == (45, 8)
