"""Grammars of requests are checked in processes of their own, since a check may never end."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from nesa_node.api.decoding import grammar_check
from nesa_node.core.errors import BusyError
from nesa_node.core.logging import get_logger

log = get_logger(__name__)

MAX_PROCESSES = 2
MAX_WAITING = 16
"""Checks of one caller, with the one that runs."""
MAX_REMEMBERED = 1024
WALL_S = 10.0
"""Of one check, on a machine that is busy with other things."""
_CHECKS_PER_PROCESS = 1000
_RETRY_S = 2.0


@dataclass(slots=True)
class _Queue:
    """The checks of one caller, of which one runs."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    length: int = 0


class GrammarChecker:
    """Runs at most `MAX_PROCESSES` checks at once, one of each caller; remembers what came of them.

    Processes start when they are needed. Close it: they end.
    """

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(MAX_PROCESSES)
        self._idle: list[_Process] = []
        self._queues: dict[str, _Queue] = {}
        self._refusals: OrderedDict[bytes, str | None] = OrderedDict()

    async def start(self) -> None:
        """Start one process now, so that the first check need not wait for it."""
        self._idle.append(await _Process.start())

    async def check(self, grammar: str, caller: str = "") -> None:
        """Raises `ValueError` for what cannot be followed, or cannot be found out in time.

        Raises `BusyError` where `caller` has too many checks waiting, or the machine is too slow.
        """
        digest = hashlib.sha256(grammar.encode()).digest()
        if digest not in self._refusals:
            async with self._turn(caller):
                if digest not in self._refusals:
                    self._remember(digest, await self._answer(grammar, caller))
        reason = self._refusals[digest]
        self._refusals.move_to_end(digest)
        if reason is not None:
            raise ValueError(reason)

    async def close(self) -> None:
        """End the processes. A check that still runs ends its own."""
        while self._idle:
            await self._idle.pop().end()

    def _remember(self, digest: bytes, reason: str | None) -> None:
        self._refusals[digest] = reason
        if len(self._refusals) > MAX_REMEMBERED:
            self._refusals.popitem(last=False)

    @asynccontextmanager
    async def _turn(self, caller: str) -> AsyncIterator[None]:
        queue = self._queues.setdefault(caller, _Queue())
        if queue.length >= MAX_WAITING:
            raise BusyError(f"{MAX_WAITING} schemas of this key wait to be read", _RETRY_S)
        queue.length += 1
        try:
            async with queue.turn, self._room:
                yield
        finally:
            queue.length -= 1
            if not queue.length:
                del self._queues[caller]

    async def _answer(self, grammar: str, caller: str) -> str | None:
        process = self._idle.pop() if self._idle else await _Process.start()
        try:
            async with asyncio.timeout(WALL_S):
                answer = await process.ask(grammar)
        except TimeoutError:
            raise BusyError("this machine is too busy to read the schema", _RETRY_S) from None
        except EOFError:
            ended = await process.end()
            log.info("grammar_check_killed", caller=caller, exit=ended, bytes=len(grammar))
            memory = grammar_check.MEMORY_BYTES >> 20
            return f"it takes more than {grammar_check.CPU_S:g} s or {memory} MiB to read"
        finally:
            await self._put_back(process)
        return answer

    async def _put_back(self, process: _Process) -> None:
        if process.is_ready and process.checks < _CHECKS_PER_PROCESS:
            self._idle.append(process)
        else:
            await process.end()


class _Process:
    """One process that runs `grammar_check`. `is_ready` while no question is unanswered."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.is_ready = True
        self.checks = 0
        self._has_ended = False

    @classmethod
    async def start(cls) -> _Process:
        """Raises `BusyError` where this machine has no room for one more."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", grammar_check.__file__),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                # Ctrl-C is for the gateway, which ends this by closing its stdin.
                start_new_session=True,
            )
        except OSError as error:
            log.warning("grammar_check_not_started", reason=str(error))
            raise BusyError("this machine has no room to read the schema", _RETRY_S) from None
        return cls(process)

    async def ask(self, grammar: str) -> str | None:
        """The refusal. Raises `EOFError` where the process ended over it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.is_ready = False
        self.checks += 1
        with suppress(ConnectionError):
            self._process.stdin.write(json.dumps(grammar).encode() + b"\n")
            await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self._has_ended = True
            raise EOFError
        self.is_ready = True
        answer: str | None = json.loads(line)
        return answer

    async def end(self) -> int:
        """Its exit status, negative for a signal."""
        if self._process.returncode is None:
            if self.is_ready:
                assert self._process.stdin is not None
                self._process.stdin.close()
            elif not self._has_ended:
                with suppress(ProcessLookupError):
                    self._process.kill()
        return await self._process.wait()
