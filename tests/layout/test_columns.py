"""Caches that several threads fill: bounded, and no thread trips over another."""

import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from reshard.layout.columns import SizedCache, drop_oldest

THREADS, EACH = 4, 1500


@pytest.fixture
def switching() -> Iterator[None]:
    """Python changes threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(act: Callable[[int, int], object]) -> list[BaseException]:
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for n in range(EACH):
                act(thread, n)
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return errors


@pytest.mark.usefixtures("switching")
def test_a_cache_that_threads_fill() -> None:
    cache: SizedCache[tuple[int, int], object] = SizedCache(max_bytes=200)
    assert in_threads(lambda thread, n: cache.put((thread, n), object(), 10)) == []
    cache.put((-1, 0), "last", 10)
    kept = [cache.get((thread, n)) for thread in range(THREADS) for n in range(EACH)]
    assert sum(one is not None for one in kept) < 20
    assert cache.get((-1, 0)) == "last"


@pytest.mark.usefixtures("switching")
def test_the_oldest_are_dropped_while_others_are_added() -> None:
    kept: dict[tuple[int, int], int] = {}

    def add(thread: int, n: int) -> None:
        drop_oldest(kept, 3)
        kept[thread, n] = n

    assert in_threads(add) == []
    kept = dict.fromkeys(((0, n) for n in range(5)), 7)
    assert drop_oldest(kept, 3) == [7, 7]
    assert [n for _, n in kept] == [2, 3, 4]
    assert drop_oldest(kept, 3) == []


def test_a_full_cache_looks_at_all_values_only_now_and_then() -> None:
    cache: SizedCache[int, int] = SizedCache(max_bytes=8000)
    looked = 0
    usual = cache._drop_oldest

    def counted() -> None:
        nonlocal looked
        looked += 1
        usual()

    cache._drop_oldest = counted  # type: ignore[method-assign]
    for n in range(10_000):
        cache.put(n, n, 10)
    assert looked < 150
    assert [cache.get(n) for n in (0, 9_999)] == [None, 9_999]
    cache.put(-1, -1, 7900)
    assert cache.get(-1) == -1
    cache.put(-2, -2, 8001)
    assert cache.get(-2) is None
