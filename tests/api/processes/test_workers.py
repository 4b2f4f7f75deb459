"""Whose work is done next where many callers wait for a few threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

import pytest

from nesa_node.api.processes.workers import FairThreadPool

_WAIT_S = 20.0


class Work:
    """Pieces that say that they have begun, and end when they are let go."""

    def __init__(self, threads: FairThreadPool) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Event()
        self._threads = threads
        self._more = threading.Condition()

    def ask(self, caller: str, times: int = 1) -> list[Future[str]]:
        return [self._threads.submit(caller, self._piece(caller)) for _ in range(times)]

    def until(self, count: int) -> list[str]:
        with self._more:
            assert self._more.wait_for(lambda: len(self.begun) >= count, _WAIT_S)
            return list(self.begun)

    def _piece(self, caller: str) -> Callable[[], str]:
        def piece() -> str:
            with self._more:
                self.begun.append(caller)
                self._more.notify_all()
            assert self.go_on.wait(_WAIT_S)
            return caller

        return piece


@pytest.fixture
def work() -> Iterator[Work]:
    threads = FairThreadPool(4, max_per_caller=2, name="test")
    found = Work(threads)
    yield found
    found.go_on.set()
    threads.shutdown()
    threads.shutdown()


def test_a_second_caller_comes_before_the_third_piece_of_the_first(work: Work) -> None:
    asked = work.ask("a", 12)
    work.until(2)
    asked += work.ask("b")
    assert work.until(3) == ["a", "a", "b"]
    work.go_on.set()
    assert [piece.result(_WAIT_S) for piece in asked] == ["a"] * 12 + ["b"]


def test_a_thread_that_becomes_free_goes_to_the_caller_that_has_fewest(work: Work) -> None:
    for caller in "abcd":
        work.ask(caller, 2 if caller in "ab" else 0)
    work.until(4)
    asked = [*work.ask("a"), *work.ask("b"), *work.ask("c", 2), *work.ask("d")]
    assert len(work.begun) == 4
    work.go_on.set()
    wait(asked, _WAIT_S)
    assert work.begun[4] == "c"


def test_servers_without_keys_use_all_threads(work: Work) -> None:
    work.ask("", 12)
    assert work.until(4) == [""] * 4


def test_what_was_cancelled_is_forgotten_and_never_begun(work: Work) -> None:
    first, second, third, last = work.ask("a", 4)
    work.until(2)
    kept = weakref.ref(third)
    assert third.cancel()
    del third
    assert kept() is None
    work.go_on.set()
    assert [piece.result(_WAIT_S) for piece in (first, second, last)] == ["a"] * 3
    assert work.begun == ["a"] * 3


def test_an_error_is_the_callers_and_takes_no_thread(work: Work) -> None:
    def fail() -> None:
        raise ValueError("this one")

    threads = FairThreadPool(1, max_per_caller=1, name="test")
    for _ in range(2):
        with pytest.raises(ValueError, match="this one"):
            threads.submit("a", fail).result(_WAIT_S)
    threads.shutdown()
    with pytest.raises(RuntimeError):
        threads.submit("a", fail)


def test_shutdown_cancels_what_waits() -> None:
    threads = FairThreadPool(1, max_per_caller=1, name="test")
    work = Work(threads)
    running, waiting = work.ask("a", 2)
    work.until(1)
    closing = threading.Thread(target=threads.shutdown)
    closing.start()
    wait([waiting], _WAIT_S)
    assert waiting.cancelled()
    work.go_on.set()
    closing.join(_WAIT_S)
    assert running.result(0) == "a"
