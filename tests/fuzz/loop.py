"""Inputs, one after another, into one parser, in this process."""

from __future__ import annotations

import asyncio
import gc
import inspect
import mmap
import random
import struct
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tests.fuzz.guide import Guide
from tests.fuzz.mutation import MAX_INPUT_BYTES, mutated
from tests.fuzz.target import Parse, Target

CORPUS = Path(__file__).parent / "corpus"
"""By target: what was found once. Each run begins with it."""
STATE_BYTES = 16 + 2 * MAX_INPUT_BYTES
_HEAD = struct.Struct("<QII")
_MAX_FINDINGS = 20
_RETRIES = 3


class Finding(msgspec.Struct, frozen=True):
    what: str
    data: bytes


class Result(msgspec.Struct):
    name: str
    inputs: int = 0
    accepted: int = 0
    cpu_s: float = 0.0
    slowest_ms: float = 0.0
    growth_mib: float = 0.0
    """Of the resident memory, in the later four fifths of the run."""
    findings: list[Finding] = []


class State:
    """The input that is being read, in memory that outlives this process."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), STATE_BYTES)
        self.parser = 0

    def put(self, number: int, data: bytes) -> None:
        _HEAD.pack_into(self._memory, 0, number, self.parser, len(data))
        self._memory[_HEAD.size : _HEAD.size + len(data)] = data

    def read(self) -> tuple[int, int, bytes]:
        """The input's number, which parser reads it, and the input."""
        number, parser, size = _HEAD.unpack_from(self._memory)
        return number, parser, self._memory[_HEAD.size : _HEAD.size + size]


async def fuzz(
    name: str, target: Target, *, inputs: int, seconds: float, seed: int, state: State | None = None
) -> Result:
    """Until `inputs` were read or `seconds` are over; the seeds and what was found once always."""
    run = _Run(name, target, state)
    asyncio.get_running_loop().set_exception_handler(run.note_task)
    began, began_cpu_s = time.perf_counter(), time.process_time()
    with target.open() as parse:
        guide = Guide(target.seeds())
        for data in (*guide.inputs, *known(name)):
            await run.read(parse, data)
        rng = random.Random(f"{name} {seed}")
        settled_at, settled = inputs // 5, _resident_bytes()
        while run.result.inputs < inputs and time.perf_counter() - began < seconds:
            data = mutated(rng, guide.inputs, target.tokens)
            if guide.is_due(rng):
                with guide.tracing(data):
                    await run.read(parse, data, timed=False)
            else:
                await run.read(parse, data)
            if run.result.inputs == settled_at:
                gc.collect()
                settled = _resident_bytes()
        gc.collect()
        run.result.growth_mib = (_resident_bytes() - settled) / 2**20
    run.result.cpu_s = time.process_time() - began_cpu_s
    return run.result


def known(name: str) -> Iterator[bytes]:
    for path in sorted((CORPUS / name).glob("*")):
        yield path.read_bytes()


class _Run:
    def __init__(self, name: str, target: Target, state: State | None) -> None:
        self.result = Result(name)
        self._refusals = target.refusals
        self._slow_s = target.slow_s
        self._state = state
        self._data = b""
        self._places: set[str] = set()

    async def read(self, parse: Parse, data: bytes, *, timed: bool = True) -> None:
        self._data = data
        if self._state is not None:
            self._state.put(self.result.inputs, data)
        began = time.perf_counter()
        self.result.accepted += await self._once(parse, data)
        took_s = time.perf_counter() - began
        self.result.inputs += 1
        if timed and took_s * 1000 > self.result.slowest_ms:
            await self._note_slow(parse, data, took_s)

    async def _once(self, parse: Parse, data: bytes) -> bool:
        """Whether it was accepted."""
        try:
            reading = parse(data)
            if inspect.isawaitable(reading):
                await reading
        except self._refusals:
            return False
        except Exception as error:
            self._note(error)
            return False
        return True

    async def _note_slow(self, parse: Parse, data: bytes, took_s: float) -> None:
        """By this thread's own time, where another process may have had the processor."""
        for _ in range(_RETRIES if took_s > self._slow_s / 2 else 0):
            began = time.thread_time()
            await self._once(parse, data)
            took_s = min(took_s, time.thread_time() - began)
        self.result.slowest_ms = max(self.result.slowest_ms, took_s * 1000)
        if took_s > self._slow_s:
            self._add("slow", f"takes {took_s:.2f} s")

    def _note(self, error: BaseException) -> None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        self._add(f"{type(error).__name__} {place}", repr(error)[:200])

    def note_task(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Of tasks that nobody awaits, hivemind's mostly."""
        error = context.get("exception")
        if isinstance(error, Exception) and not isinstance(error, self._refusals):
            self._note(error)

    def _add(self, place: str, what: str) -> None:
        if place not in self._places and len(self._places) < _MAX_FINDINGS:
            self._places.add(place)
            self.result.findings.append(Finding(f"{place}: {what}", self._data))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
