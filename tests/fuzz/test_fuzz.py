"""No parser of bytes that a peer, a hub or a client chose fails but by refusing them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from nesa_node.core.errors import FrameError
from tests.fuzz.loop import STATE_BYTES, Result, State, fuzz
from tests.fuzz.target import Parse, Target

ROOT = Path(__file__).resolve().parents[2]


def _fuzz(*arguments: str, timeout_s: float) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--seed", "1", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no crash, no hang, no growth" in done.stdout


@pytest.mark.timeout(400)
def test_what_was_found_once_and_thousands_of_inputs_crash_nothing() -> None:
    _fuzz("--inputs", "40000", "--seconds", "30", "--together", timeout_s=390)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_half_a_million_inputs_crash_nothing() -> None:
    _fuzz("--inputs", "500000", "--seconds", "900", "--jobs", "2", timeout_s=1450)


async def _fuzzed(
    read: Parse,
    inputs: int,
    *,
    seeds: Sequence[bytes] = (b"long" * 50, b"short"),
    tokens: Sequence[bytes] = (b"!",),
) -> Result:
    target = Target(open=lambda: nullcontext(read), seeds=lambda: seeds, tokens=tokens)
    return await fuzz("none", target, inputs=inputs, seconds=30.0, seed=1)


async def test_fuzzer_tells_of_foreign_errors_and_of_none_of_ours() -> None:
    def read(data: bytes) -> None:
        if b"!" in data:
            raise KeyError("found")
        raise FrameError("refused")

    result = await _fuzzed(read, 2000)
    assert [finding.what.split()[0] for finding in result.findings] == ["KeyError"]
    assert b"!" in result.findings[0].data


async def test_inputs_that_reach_new_code_are_changed_further() -> None:
    """Four changes, each in its place, come together once in many millions of inputs.

    Guided, they take 11,000 inputs on average, and which they are differs from run to run.
    """

    def read(data: bytes) -> None:
        if data[:1] != b"b":
            return
        if data[1:2] != b"o":
            return
        if data[2:3] != b"m":
            return
        if data[3:4] == b"b":
            raise KeyError("found")

    result = await _fuzzed(read, 200_000, seeds=[b"seed"], tokens=[b"b", b"o", b"m"])
    assert [finding.data[:4] for finding in result.findings] == [b"bomb"]


async def test_fuzzer_tells_of_slow_inputs() -> None:
    def read(data: bytes) -> None:
        until = time.thread_time() + 0.15
        while len(data) > 100 and time.thread_time() < until:
            pass

    result = await _fuzzed(read, 2)
    assert [finding.what.split(":")[0] for finding in result.findings] == ["slow"]


def test_crash_of_a_child_is_a_finding(tmp_path: Path) -> None:
    """The input is in memory that outlives the process."""
    path = tmp_path / "state"
    path.write_bytes(bytes(STATE_BYTES))
    code = (
        "import os, pathlib, sys; from tests.fuzz.loop import State;"
        "state = State(pathlib.Path(sys.argv[1])); state.put(7, b'bomb'); os.abort()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, check=False, capture_output=True
    )
    assert done.returncode < 0
    assert State(path).read() == (7, 0, b"bomb")
