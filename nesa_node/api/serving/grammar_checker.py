"""Checks of requests' grammars in child processes, since a check may never end."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict

from nesa_node.api.decoding import grammar_check
from nesa_node.api.processes.child_processes import Ask, ChildProcesses, Program

MAX_WAITING = 16
"""Limit on the unfinished checks of one caller."""
MAX_REMEMBERED = 1024
"""Limit on cached results of checks."""
_PROGRAM = Program(
    grammar_check.__file__,
    "read a schema",
    cpu_s=grammar_check.CPU_S,
    memory_bytes=grammar_check.MEMORY_BYTES,
    answer_bytes=1 << 16,
    most_waiting=MAX_WAITING,
)


class GrammarChecker:
    """Checks grammars in `ChildProcesses`, and caches the results. Close it after use."""

    def __init__(self) -> None:
        self._processes = ChildProcesses(_PROGRAM)
        self._refusals: OrderedDict[bytes, str | None] = OrderedDict()

    async def start(self) -> None:
        """Start one process in advance, so that the first check does not wait for it."""
        await self._processes.start()

    async def check(self, grammar: str, caller: str = "") -> None:
        """Raise `ValueError` if `grammar` cannot be followed or exceeds the limits of a check.

        Raises `BusyError` if `caller` has too many checks waiting, or the machine is too slow.
        """
        digest = hashlib.sha256(grammar.encode()).digest()
        if digest not in self._refusals:
            async with self._processes.turn(caller) as ask:
                if digest not in self._refusals:
                    self._remember(digest, await _refusal(grammar, ask))
        reason = self._refusals[digest]
        self._refusals.move_to_end(digest)
        if reason is not None:
            raise ValueError(reason)

    async def close(self) -> None:
        """End the child processes; a busy one ends after its check."""
        await self._processes.close()

    def _remember(self, digest: bytes, reason: str | None) -> None:
        self._refusals[digest] = reason
        if len(self._refusals) > MAX_REMEMBERED:
            self._refusals.popitem(last=False)


async def _refusal(grammar: str, ask: Ask) -> str | None:
    answer = await ask(json.dumps(grammar).encode())
    if answer is None:
        return f"it takes more than {_PROGRAM.limits()} to read"
    reason: str | None = json.loads(answer)
    return reason
