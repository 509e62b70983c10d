"""The process group that sharded tensors get when they are loaded."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from reshard.nn import current_process_group, load_with_process_group
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group


def run_current_group(rank: int) -> None:
    default, small = dist.group.WORLD, pool_group(2)
    assert current_process_group() is default
    with load_with_process_group(small) as given:
        assert given is small
        assert current_process_group() is small
    assert current_process_group() is default


def test_B54_the_group_of_the_context_or_the_default_one(pool: Pool) -> None:
    pool.run(run_current_group, ranks=range(2))


def run_nested(rank: int) -> None:
    small = pool_group(2)
    with load_with_process_group(small):
        for inner in (small, dist.group.WORLD):
            with pytest.raises(RuntimeError, match="already set"), load_with_process_group(inner):
                raise AssertionError("entered")
        assert current_process_group() is small
    assert current_process_group() is dist.group.WORLD


def test_B53_nesting_is_an_error(pool: Pool) -> None:
    pool.run(run_nested, ranks=range(2))


def run_exception(rank: int) -> None:
    with pytest.raises(KeyError, match="inside"), load_with_process_group(pool_group(2)):
        raise KeyError("inside")
    assert current_process_group() is dist.group.WORLD
    with load_with_process_group(pool_group(2)):
        assert current_process_group() is pool_group(2)


def test_B53_restored_after_an_exception(pool: Pool) -> None:
    pool.run(run_exception, ranks=range(2))


def run_other_thread(rank: int) -> None:
    seen = []
    with load_with_process_group(pool_group(2)):
        thread = threading.Thread(target=lambda: seen.append(current_process_group()))
        thread.start()
        thread.join()
    assert seen == [dist.group.WORLD]


def test_D32_other_threads_do_not_see_it(pool: Pool) -> None:
    pool.run(run_other_thread, ranks=range(2))


@pytest.mark.parametrize("given", [None, 3, "default"])
def test_D32_what_is_no_group_is_a_type_error(given: object) -> None:
    with (
        pytest.raises(TypeError, match=f"found {type(given).__name__}"),
        load_with_process_group(given),  # type: ignore[arg-type]
    ):
        raise AssertionError("entered")


def test_B52_there_is_no_group_before_init() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="init_process_group"):
        current_process_group()
