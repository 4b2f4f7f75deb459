"""Workers beside the event loop: child processes for untrusted work, threads shared fairly.

Child processes have limits of CPU time and memory. malloc is set for many threads.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nesa_node.api.processes import child_program
from nesa_node.core.errors import BusyError
from nesa_node.core.logging import get_logger
from nesa_node.web.authenticator import current_caller

log = get_logger(__name__)

MAX_PROCESSES = 2
"""Limit on the processes of one pool."""
MAX_ANSWER_WALL_S = 10.0
"""Wall-clock limit of one answer, for a machine that is busy with other work."""
_MAX_START_S = 30.0
"""Time limit until a started process is ready."""
_MAX_EXIT_S = 5.0
"""Time limit until a process that closed its output has exited."""
_MAX_ANSWERS_PER_PROCESS = 1000
"""Answers after which a process is replaced."""
_RETRY_S = 2.0
_SINGLE_THREAD_ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of a process: the stacks of one thread per core would exceed its memory limit."""

Ask = Callable[[bytes], Awaitable[bytes | None]]
"""Function from a question, JSON in one line, to its answer in JSON; None: a limit was exceeded."""


@dataclass(frozen=True, slots=True)
class ChildProgram:
    """Program of child processes. `task` names its work in messages: "read a schema"."""

    path: str
    task: str
    cpu_s: float
    """CPU time limit of one answer."""
    memory_bytes: int
    """Limit on the address space of a process."""
    max_answer_bytes: int
    """Limit on one answer."""
    max_waiting: int
    """Limit on the unanswered questions of one caller."""

    def describe_limits(self) -> str:
        return f"{self.cpu_s:g} s or {self.memory_bytes >> 20} MiB"


@dataclass(slots=True)
class _CallerQueue:
    """Queue of one caller's questions, which are answered one at a time."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    length: int = 0


class ChildProcessPool:
    """Pool that answers up to `MAX_PROCESSES` questions at once, one of each caller.

    Processes start on demand, and end with `close`.
    """

    def __init__(self, program: ChildProgram) -> None:
        self._program = program
        self._slots = asyncio.Semaphore(MAX_PROCESSES)
        self._idle: deque[_ChildProcess] = deque()
        self._queues: dict[str, _CallerQueue] = {}
        self._closed = False

    async def start(self) -> None:
        """Start one process in advance, so that the first question does not wait for it."""
        self._idle.append(await _ChildProcess.start(self._program))

    @asynccontextmanager
    async def wait_turn(self, caller: str | None = None) -> AsyncIterator[Ask]:
        """Wait for the turn of `caller`, by default this request's; yield a function that asks.

        Raises `BusyError` if `caller` has too many questions waiting. Asking raises it if the
        machine is too slow or cannot start a process.
        """
        caller = current_caller() if caller is None else caller
        queue = self._queues.setdefault(caller, _CallerQueue())
        if queue.length >= self._program.max_waiting:
            raise BusyError(
                f"{queue.length} requests of this key wait for the gateway to {self._program.task}",
                _RETRY_S,
            )
        queue.length += 1
        try:
            async with queue.turn, self._slots:
                yield lambda question: self._answer(question, caller)
        finally:
            queue.length -= 1
            if not queue.length:
                del self._queues[caller]

    async def close(self) -> None:
        """End idle processes; a busy one ends once its question is answered."""
        self._closed = True
        while self._idle:
            await self._idle.popleft().end()

    async def _answer(self, question: bytes, caller: str) -> bytes | None:
        process = self._idle.popleft() if self._idle else await _ChildProcess.start(self._program)
        try:
            async with asyncio.timeout(MAX_ANSWER_WALL_S):
                answer = await process.ask(question)
        except TimeoutError:
            raise BusyError(f"this machine is too busy to {self._program.task}", _RETRY_S) from None
        finally:
            await self._release(process)
        if answer is None:
            log.info(
                "child_process_ended",
                task=self._program.task,
                caller=caller,
                exit=await process.end(),
                bytes=len(question),
            )
            # Still in the turn of this caller, so that no other caller waits for a new process.
            with suppress(BusyError):
                await self._release(await _ChildProcess.start(self._program))
        return answer

    async def _release(self, process: _ChildProcess) -> None:
        if process.is_ready and process.answers < _MAX_ANSWERS_PER_PROCESS and not self._closed:
            self._idle.append(process)
        else:
            await process.end()


class _ChildProcess:
    """Process that runs a program; `is_ready` if no question is unanswered."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.is_ready = False
        self.answers = 0
        self._stdout_closed = False

    @classmethod
    async def start(cls, program: ChildProgram) -> _ChildProcess:
        """Start a process and wait until it is ready. Raises `BusyError` if that fails."""
        limits = f"{program.cpu_s}", f"{program.memory_bytes}"
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", child_program.__file__, program.path, *limits),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=program.max_answer_bytes,
                env={**os.environ, **_SINGLE_THREAD_ENV},
                # Keeps Ctrl-C from the process: the gateway ends it by closing its stdin.
                start_new_session=True,
            )
        except OSError as error:
            raise _start_error(program, str(error)) from None
        child = cls(process)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_MAX_START_S):
                    await child._read()
        finally:
            if not child.is_ready:
                ended = await child.end()
        if not child.is_ready:
            raise _start_error(program, f"exit {ended}")
        return child

    async def ask(self, question: bytes) -> bytes | None:
        """Answer to `question`; None: the process ended, or its answer was too long."""
        assert self._process.stdin is not None
        self.is_ready = False
        self.answers += 1
        with suppress(ConnectionError):
            self._process.stdin.write(question + b"\n")
            await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> bytes | None:
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
        except ValueError:
            return None  # longer than `max_answer_bytes`
        self.is_ready = line.endswith(b"\n")
        self._stdout_closed = not self.is_ready
        return line if self.is_ready else None

    async def end(self) -> int:
        """End the process; return its exit status, negative for a signal."""
        if self._stdout_closed:
            # It is exiting: killing it now could hide its exit status from asyncio.
            with suppress(TimeoutError):
                async with asyncio.timeout(_MAX_EXIT_S):
                    return await self._process.wait()
        if self._process.returncode is None:
            if self.is_ready:
                assert self._process.stdin is not None
                self._process.stdin.close()
            else:
                with suppress(ProcessLookupError):
                    self._process.kill()
        # asyncio reports an exit only after all output was read, which `wait` does not do.
        await self._process.communicate()
        return await self._process.wait()


def _start_error(program: ChildProgram, reason: str) -> BusyError:
    log.warning("child_process_start_failed", task=program.task, reason=reason)
    return BusyError(f"this machine could not start a process to {program.task}", _RETRY_S)


T = TypeVar("T")

_Work = Callable[[], Any]


class FairThreadPool:
    """Thread pool of `threads` threads, of which one caller may use `max_per_caller`.

    The next work to run is of the caller with the fewest running threads, in order of arrival.
    The caller "" stands for servers without keys and may use all threads. Thread-safe. Close it
    with `shutdown`.
    """

    def __init__(self, threads: int, *, max_per_caller: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._threads = threads
        self._max_per_caller = max_per_caller
        self._lock = threading.Lock()
        self._waiting: dict[Future[Any], tuple[str, _Work]] = {}
        self._running: Counter[str] = Counter()
        self._closed = False

    def submit(self, caller: str, work: Callable[[], T]) -> Future[T]:
        """Queue `work`; return a future of its result. Cancelling it removes it from the queue.

        Raises `RuntimeError` after `shutdown`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("these threads take no more work")
            self._waiting[future] = caller, work
        future.add_done_callback(self._remove_waiting)
        self._start_waiting()
        return future

    def shutdown(self) -> None:
        """Cancel queued work and wait for running work. May be called twice."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()
        self._pool.shutdown()

    def _remove_waiting(self, future: Future[Any]) -> None:
        with self._lock:
            waited = self._waiting.pop(future, None) is not None
        if waited:
            # Cancelled while queued: this notifies `concurrent.futures.wait`.
            future.set_running_or_notify_cancel()

    def _start_waiting(self) -> None:
        with self._lock:
            while not self._closed and (future := self._next_future()) is not None:
                caller, work = self._waiting.pop(future)
                self._running[caller] += 1
                self._pool.submit(self._run, caller, future, work)

    def _next_future(self) -> Future[Any] | None:
        """Next work to run if a thread is free. Linear in the queue: about a thousand entries."""
        if self._running.total() >= self._threads:
            return None
        may_begin = (
            (self._running[caller], number, future)
            for number, (future, (caller, _)) in enumerate(self._waiting.items())
            if not caller or self._running[caller] < self._max_per_caller
        )
        return min(may_begin, key=lambda each: each[:2], default=(0, 0, None))[2]

    def _run(self, caller: str, future: Future[Any], work: _Work) -> None:
        try:
            if future.set_running_or_notify_cancel():
                _set_result(future, work)
        finally:
            with self._lock:
                self._running[caller] -= 1
                self._running += Counter()
            self._start_waiting()


def _set_result(future: Future[Any], work: _Work) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
        # Avoids a reference cycle: the error's traceback refers to this frame.
        del future
    else:
        future.set_result(result)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MAX_ARENAS = 2
_MMAP_THRESHOLD_BYTES = 1 << 20
_TRIM_THRESHOLD_BYTES = 8 << 20
_mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)


def share_malloc_arenas() -> None:
    """Limit malloc's arenas, so that threads reuse each other's memory. Call before threads start.

    Without effect unless the C library is glibc. By default glibc has eight arenas per core, and
    each keeps the memory of its thread's logits: hundreds of MiB that no other request can use.
    glibc also raises its mmap threshold, up to 32 MiB, when a mapped block is freed; large blocks
    then come from arenas, where small blocks fragment them. A fixed threshold keeps large blocks
    mapped, so that freeing returns them to the system.
    """
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, _MAX_ARENAS)
        _mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        # A fixed mmap threshold would otherwise return and refault the memory of each request.
        _mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
