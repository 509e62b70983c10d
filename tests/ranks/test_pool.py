"""The ranks that other tests run on: they answer, and whatever goes wrong on them is told."""

import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks.outcome import Died, HangError, Raised, RankError, Returned
from tests.ranks.pool import MAX_THREADS, Pool, fresh_ranks
from tests.ranks.rank import pool_group, tell
from tests.ranks.worker import Worker, start_fork_server

LONG = 30.0


def sum_of_ranks(rank: int, size: int) -> int:
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor, group=pool_group(size))
    return int(tensor.item())


def pid_of(rank: int) -> int:
    del rank
    return os.getpid()


def num_threads(rank: int) -> tuple[int, int]:
    """Of torch in this rank, and of the process that it was forked from."""
    del rank
    return torch.get_num_threads(), len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))


def double(rank: int, tensor: torch.Tensor) -> torch.Tensor:
    del rank
    return tensor * 2


def fail_on_odd_ranks(rank: int) -> int:
    if rank % 2:
        raise ValueError("odd ranks fail")
    return rank


def fail_on_rank_1_while_others_wait(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 does not come")
    dist.barrier()


def hang_on_rank_2(rank: int) -> None:
    if rank == 2:
        sleep_long(rank)


def sleep_long(rank: int) -> None:
    tell(f"rank {rank} sleeps")
    stay()


def stay() -> None:
    time.sleep(LONG)


def exit_on_rank_3(rank: int) -> None:
    if rank == 3:
        os._exit(7)


def crash(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def make_group(rank: int, ranks: list[int]) -> None:
    group = dist.new_group(ranks)
    if rank in ranks:
        dist.all_reduce(torch.ones(1), group=group)


def num_own_threads(rank: int) -> int:
    del rank
    return len(list(Path("/proc/self/task").iterdir()))


def warn(rank: int) -> None:
    warnings.warn(f"from rank {rank}", UserWarning, stacklevel=1)


def leave_a_lock(rank: int) -> threading.Lock:
    del rank
    return threading.Lock()


def leave_a_thread(rank: int) -> None:
    del rank
    threading.Thread(target=stay).start()


def is_initialized(rank: int) -> bool:
    del rank
    return dist.is_initialized()


def test_collectives_on_all_ranks_and_on_the_first_ones(pool: Pool) -> None:
    assert pool.run(sum_of_ranks, 8) == [28] * 8
    assert pool.run(sum_of_ranks, 4, ranks=range(4)) == [6] * 4
    assert pool.run(sum_of_ranks, 2, ranks=[1, 0]) == [1] * 2


def test_ranks_are_kept(pool: Pool) -> None:
    pids = pool.run(pid_of)
    assert len({*pids, os.getpid()}) == 9
    assert pool.run(pid_of) == pids
    assert pool.run(pid_of, ranks=[5, 2]) == [pids[5], pids[2]]


def test_ranks_are_single_threaded_and_safe_to_fork(pool: Pool) -> None:
    assert pool.run(num_threads) == [(1, 1)] * 8


def lose_a_thread(rank: int) -> int:
    thread = threading.Thread(target=lambda: 1 // rank)
    thread.start()
    thread.join()
    return rank


def test_a_thread_that_ends_with_an_exception_is_an_error(pool: Pool) -> None:
    first, second = pool.outcomes(lose_a_thread, ranks=range(2))
    assert isinstance(first, Raised)
    assert "ZeroDivisionError" in first.message
    assert isinstance(second, Returned)


def test_tensors_come_and_go_as_copies(pool: Pool) -> None:
    tensor = torch.arange(100_000, dtype=torch.bfloat16)
    for result in pool.run(double, tensor):
        assert torch.equal(result, tensor * 2)


def test_errors_are_shown_and_the_next_run_works(pool: Pool) -> None:
    with pytest.raises(RankError, match="ranks 1, 3, 5, 7 failed") as caught:
        pool.run(fail_on_odd_ranks)
    assert "ranks 1, 3, 5, 7 raised ValueError: odd ranks fail\nTraceback" in str(caught.value)
    assert 'raise ValueError("odd ranks fail")' in str(caught.value)
    assert pool.run(sum_of_ranks, 8) == [28] * 8


def test_errors_as_values_leave_the_ranks_alone(pool: Pool) -> None:
    pids = pool.run(pid_of)
    even, odd = pool.outcomes(fail_on_odd_ranks, ranks=[4, 5])
    assert isinstance(even, Returned)
    assert even.value == 4
    assert isinstance(odd, Raised)
    assert (odd.kind, odd.message) == ("ValueError", "odd ranks fail")
    assert 0 <= odd.seconds < 1
    assert abs(odd.ended - even.ended) < 5
    assert pool.run(pid_of) == pids


def test_the_rank_that_failed_is_told_and_not_only_those_that_wait_for_it(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.ranks.pool.GRACE", 0.3)
    with pytest.raises(RankError) as caught:
        pool.run(fail_on_rank_1_while_others_wait)
    assert "rank 1 failed, ranks 0, 2, 3, 4, 5, 6, 7 did not end" in str(caught.value)
    assert "rank 1 raised ValueError: rank 1 does not come" in str(caught.value)
    assert "in barrier" in str(caught.value)


def test_a_hang_ends_with_stacks_and_the_next_run_works(pool: Pool) -> None:
    pids = pool.run(pid_of)
    start = time.monotonic()
    with pytest.raises(HangError, match=r"rank 2 did not end \(timeout 0.3 s\)") as caught:
        pool.run(hang_on_rank_2, timeout=0.3)
    assert time.monotonic() - start < 5
    assert "stacks of rank 2:" in str(caught.value)
    assert "in sleep_long" in str(caught.value)
    assert "stacks of rank 7:" in str(caught.value)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert pool.run(sum_of_ranks, 8) == [28] * 8


def test_a_dead_rank_is_noticed_at_once(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 3 died: exited with 7"):
        pool.run(exit_on_rank_3)
    assert time.monotonic() - start < 5
    assert pool.run(sum_of_ranks, 8) == [28] * 8


def test_warnings_and_values_that_cannot_be_sent_are_errors(pool: Pool) -> None:
    (warned,) = pool.outcomes(warn, ranks=[0])
    (locked,) = pool.outcomes(leave_a_lock, ranks=[0])
    assert isinstance(warned, Raised)
    assert isinstance(locked, Raised)
    assert (warned.kind, warned.message) == ("UserWarning", "from rank 0")
    assert "cannot pickle" in locked.message


def test_a_crash_leaves_its_stack() -> None:
    with fresh_ranks(1, init=False) as ranks:
        (died,) = ranks.outcomes(crash)
    assert isinstance(died, Died)
    assert died.exit_code == -signal.SIGSEGV
    assert "in crash" in died.stacks


def test_fresh_ranks_start_quickly_and_leave_nothing(pool: Pool) -> None:
    pool.run(pid_of)  # the fork server runs from here on
    start = time.monotonic()
    with fresh_ranks(4) as ranks:
        seconds = time.monotonic() - start
        pids = ranks.pids
        assert ranks.run(pid_of) == pids
        assert ranks.run(sum_of_ranks, 2, ranks=[0, 1]) == [1, 1]
    assert seconds < 4 * 0.5
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_ranks_without_a_process_group() -> None:
    with fresh_ranks(2, init=False) as ranks:
        assert ranks.run(is_initialized) == [False, False]


def test_kill_and_interrupt_while_a_function_runs() -> None:
    with fresh_ranks(3) as ranks:
        job = ranks.begin(sleep_long)
        assert [job.hear(rank) for rank in (2, 1)] == ["rank 2 sleeps", "rank 1 sleeps"]
        ranks.kill(1)
        ranks.kill(2, signal.SIGINT)
        killed, interrupted = job.outcomes(10, ranks=[1, 2])
        assert isinstance(killed, Died)
        assert killed.exit_code == -signal.SIGKILL
        assert isinstance(interrupted, Raised)
        assert interrupted.kind == "KeyboardInterrupt"
        assert ranks.run(pid_of, ranks=[2]) == [ranks.pids[2]]
        with pytest.raises(ProcessLookupError, match="rank 1 killed by SIGKILL already"):
            ranks.kill(1)
        with pytest.raises(RuntimeError, match="rank 0 still busy"):
            ranks.run(pid_of)


def test_an_idle_rank_takes_no_notice_of_an_interrupt() -> None:
    with fresh_ranks(1, init=False) as ranks:
        ranks.kill(0, signal.SIGINT)
        assert ranks.run(pid_of) == ranks.pids


def test_a_stopped_rank_can_go_on() -> None:
    with fresh_ranks(2) as ranks:
        ranks.kill(1, signal.SIGSTOP)
        job = ranks.begin(sum_of_ranks, 2)
        ranks.kill(1, signal.SIGCONT)
        assert job.results(10) == [1, 1]


def test_ranks_that_took_part_in_different_functions_make_a_group(pool: Pool) -> None:
    for _ in range(3):
        pool.run(make_group, [0, 1], ranks=[0, 1])
    pool.run(make_group, list(range(8)), timeout=20)


def test_ranks_with_many_threads_are_replaced_before_the_next_test() -> None:
    pool = Pool(2)
    try:
        pids = pool.run(pid_of)
        pool.renew()
        assert pool.run(pid_of) == pids
        while max(pool.run(num_own_threads)) <= MAX_THREADS:
            pool.run(make_group, [0, 1])
        pool.renew()
        assert not set(pool.run(pid_of)) & set(pids)
    finally:
        pool.close()


def test_silence_is_told() -> None:
    with fresh_ranks(1, init=False) as ranks:
        job = ranks.begin(pid_of)
        with pytest.raises(RankError, match=r"pid_of: rank 0 told nothing, Returned\(value="):
            job.hear(0)


def test_a_rank_that_does_not_leave_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks.pool.LEAVE_WITHIN", 0.3)
    with (
        pytest.raises(RankError, match=r"(?s)told to leave, rank 0 .*in stay"),
        fresh_ranks(1, init=False) as ranks,
    ):
        ranks.run(leave_a_thread)


def test_ranks_end_when_the_parent_is_gone() -> None:
    start_fork_server()
    worker = Worker(0)
    try:
        worker.wait_until_ready()
        worker.send(sleep_long, (), 1)
        os.kill(worker.pid, signal.SIGSTOP)
        worker.lifeline.close()
        assert worker.gone_within(5)
    finally:
        worker.release()
