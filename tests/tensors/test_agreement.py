"""All ranks of a group agree, or all raise the same error; the next call works again."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard as rs
from reshard.errors import CheckpointError
from reshard.live.session import rendezvous
from reshard.tensors import agreement
from reshard.tensors.agreement import Agreement, describe_values
from tests.ranks.pool import Pool, fresh_ranks
from tests.ranks.rank import pool_group


def four(what: str = "a test", **fields: Any) -> Agreement:
    return Agreement(pool_group(4), what, **{"timeout": 20.0, **fields})


def message_of(action: Callable[[], object], kind: type[Exception]) -> str:
    """The message of the error that an action raises here; the ranks work together afterwards."""
    with pytest.raises(kind) as caught:
        action()
    assert isinstance(caught.value, rs.ReshardError)
    assert four().gather("after") == dict.fromkeys(range(4), "after")
    return str(caught.value)


def gather_values(rank: int) -> None:
    for value in (None, rank, [rank, "\u00e9"], {"name": [1.5, rank]}, "long " * 5000 * rank):
        gathered = four().gather(value)
        assert list(gathered) == [0, 1, 2, 3]
        assert gathered[rank] == value
    assert four().gather("x" * 3000 * rank) == {one: "x" * 3000 * one for one in range(4)}
    assert four().run_on_first(lambda: 3) == 3
    assert four().is_first == (rank == 0)


def test_values_of_all_ranks(pool: Pool) -> None:
    pool.run(gather_values, ranks=range(4))


def gather_in_order_of_group(rank: int) -> tuple[int, list[int]]:
    group = dist.new_group([6, 4, 7])
    if rank not in (4, 6, 7):
        with pytest.raises(rs.LiveError, match=f"rank {rank} is not in the process group"):
            Agreement(group, "a test").gather(1)
        return 0, []
    ranks = Agreement(group, "a test", timeout=20.0)
    gathered = ranks.gather(rank * 10)
    assert gathered == {one: one * 10 for one in (4, 6, 7)}
    return ranks.run_on_first(lambda: rank), list(gathered)


def test_a_group_of_some_ranks(pool: Pool) -> None:
    results = pool.run(gather_in_order_of_group)
    assert len({str(results[rank]) for rank in (4, 6, 7)}) == 1
    first, order = results[4]
    assert order[0] == first


def fail_on(failing: tuple[int, ...], error: Exception) -> str:
    def step() -> int:
        if four().rank in failing:
            raise error
        return 1

    return message_of(lambda: four().run(step), type(error))


class OwnKeyError(KeyError):
    """An error of a caller."""


def raise_on_some(rank: int) -> list[str]:
    messages = [
        fail_on((2,), rs.TensorError("too small")),
        fail_on((1, 3), TypeError(f"wrong on\n{rank}")),
        fail_on((0, 1, 2, 3), rs.LayoutError("same everywhere")),
        fail_on((0,), KeyError("name")),
    ]
    own = four().run  # a class that other ranks do not know becomes its builtin
    messages.append(message_of(lambda: own(lambda: _raise(OwnKeyError("key"))), KeyError))
    loading = four(error=CheckpointError)
    messages.append(message_of(lambda: loading.run(lambda: 1 // (rank - 1)), CheckpointError))
    messages.append(message_of(lambda: four().run(lambda: {"no JSON": object}), TypeError))
    return messages


def _raise(error: Exception) -> None:
    raise error


def test_a_step_that_fails_somewhere_raises_everywhere(pool: Pool) -> None:
    first, *others = pool.run(raise_on_some, ranks=range(4))
    assert others == [first] * 3
    assert first[:6] == [
        "on rank 2: too small",
        "on rank 1: wrong on 1",
        "same everywhere",
        "on rank 0: name",
        "key",
        "on rank 1: ZeroDivisionError: integer division or modulo by zero",
    ]
    assert "not JSON serializable" in first[6]


def check_values(rank: int) -> list[str]:
    def check_equal(what: str, values: dict[str, Any]) -> None:
        four(what).check_gathered(four(what).gather(values))

    check_equal("saving", {"path": "a", "shape": (2, 3)})
    one, other = {"a": 1, "path": rank // 3}, {"a": 1} if rank else {}
    return [
        message_of(lambda: check_equal("saving", one), rs.DisagreementError),
        message_of(lambda: check_equal("saving", other), rs.DisagreementError),
        message_of(lambda: four(f"call {rank % 2}").gather(0), rs.DisagreementError),
    ]


def test_values_that_differ_are_named(pool: Pool) -> None:
    first, *others = pool.run(check_values, ranks=range(4))
    assert others == [first] * 3
    path, missing, calls = first
    assert path == (
        "saving has different path: ranks 0-2 have 0, rank 3 has 1; give the same on all ranks"
    )
    assert missing.startswith("saving has different a: ranks 1-3 have 1, rank 0 has null; give")
    assert calls == (
        'ranks are in different calls: ranks 0,2 are in "call 0", ranks 1,3 are in "call 1"; make '
        "the same calls in the same order on all ranks"
    )


def send_too_much(rank: int) -> list[str]:
    usual, agreement.MAX_BYTES = agreement.MAX_BYTES, 4000
    long = "".join(map(str, range(6000))) if rank == 2 else ""
    try:
        message = message_of(lambda: four().gather(long), rs.LiveError)
    finally:
        agreement.MAX_BYTES = usual
    return [message]


def test_a_value_that_is_too_long(pool: Pool) -> None:
    first, *others = pool.run(send_too_much, ranks=range(4))
    assert others == [first] * 3
    assert first[0].startswith("rank 2 has ")
    assert first[0].endswith(" bytes to send in a test: at most 4000 work")


def leave_or_die(rank: int, how: str) -> tuple[str, float]:
    four().gather(0)
    if rank == 2 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        time.sleep(1.6)
        return "", 0.0
    began = time.monotonic()
    with pytest.raises(rs.LiveError) as caught:
        four(timeout=0.6).gather(0)
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - began


@pytest.mark.parametrize(
    ("how", "kind"), [("killed", "PeerLostError"), ("late", "MoveTimeoutError")]
)
def test_a_rank_that_does_not_come(how: str, kind: str) -> None:
    with fresh_ranks(4) as ranks:
        outcomes = ranks.outcomes(leave_or_die, how)
    for rank in (0, 1, 3):
        message, seconds = outcomes[rank].value
        assert message.startswith(kind), message
        assert "rank 2" in message, message
        assert message.endswith("in a test"), message
        assert seconds < 15


def test_alone() -> None:
    alone = Agreement(None, "a test")
    assert alone.gather({"a": (1, 2)}) == {0: {"a": (1, 2)}}
    assert alone.run_on_first(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        alone.run(lambda: 1 // 0)


def test_many_values_in_a_message() -> None:
    text = describe_values({rank: f"value {rank}" for rank in range(9)})
    assert text.endswith('rank 3 has "value 3" and 5 more values')


def gather_without_a_backend_for_cpus(rank: int) -> int:
    """As in a group of NCCL only whose ranks are on two hosts; gives the number of values."""
    group = dist.new_group(range(4), backend="cuda:gloo")
    if rank >= 4:
        return 0
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.zeros(1), group=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "host_identity", lambda: "ab"[rank % 2])
        ranks = Agreement(group, "a test", timeout=20.0)
        for value in ([rank], "long " * 5000 * rank):
            assert ranks.gather(value)[rank] == value
        with pytest.raises(rs.DisagreementError, match="has different number"):
            ranks.check_gathered(ranks.gather({"number": rank}))
        return len(ranks.gather(rank))


def test_a_group_that_has_no_backend_for_cpus_on_two_hosts(pool: Pool) -> None:
    assert pool.run(gather_without_a_backend_for_cpus) == [4] * 4 + [0] * 4
