"""Study of stored snapshots in a process of its own: `python -m` this module PARENT_PID.

Reads a `Question` from standard input and writes `Findings` to standard output, both as JSON. It
runs at the lowest priority and ends with its parent process. The system ends it when it exceeds its
processor time.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from nesa_node.routing.placement.library_file import to_json
from nesa_node.routing.placement.precompute import precompute
from nesa_node.routing.placement.score import Goal
from nesa_node.routing.retune import retune
from nesa_node.routing.tuned import TUNED
from nesa_node.routing.tuner import believed, told_of
from nesa_node.server.snapshot_store import read_store

SNAPSHOTS = 1000
"""Newest snapshots that are studied."""
_LOWEST_PRIORITY = 19
_GRACE_S = 30
"""Additional processor time for starting and reading."""
_LOOK_EVERY_S = 1.0


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`exponents` are those in use; each part may take about `seconds` of processor time."""

    store: str
    goal: Goal
    replicas: int
    seconds: float
    seed: int
    exponents: dict[str, float]


class Findings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`exponents` are those to use from now on; `library` is a document of `library_file`, or None.

    `tuning` and `schemas` give the reasons in words.
    """

    exponents: dict[str, float]
    tuning: str
    gain: float = 0.0
    gain_error: float = 0.0
    learnt_from: int = 0
    held_out: int = 0
    candidates: int = 0
    library: str | None = None
    schemas: str
    regret: float | None = None


def study(question: Question) -> Findings:
    """Tune exponents and precompute schemas. Raises `ConfigError` for an unreadable store."""
    snapshots = read_store(Path(question.store), SNAPSHOTS)
    now = believed(question.exponents, TUNED) or TUNED
    tuned = retune(
        snapshots,
        np.random.default_rng((question.seed, 0)),
        now=now,
        seconds=question.seconds,
        clock=time.process_time,
    )
    schemas = precompute(
        snapshots,
        np.random.default_rng((question.seed, 1)),
        goal=question.goal,
        replicas=question.replicas,
        seconds=question.seconds,
        clock=time.process_time,
    )
    return Findings(
        exponents=told_of(tuned.parameters),
        tuning=tuned.reason,
        gain=tuned.gain,
        gain_error=tuned.gain_error,
        learnt_from=tuned.learnt_from,
        held_out=tuned.held_out,
        candidates=tuned.candidates,
        library=None if schemas.library is None else to_json(schemas.library).decode(),
        schemas=schemas.reason,
        regret=schemas.regret,
    )


def _end_with(parent: int) -> None:
    """Exit when the parent process is gone: a killed parent cannot end this process."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    os.nice(_LOWEST_PRIORITY)
    most_s = int(2 * question.seconds) + _GRACE_S
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))
    sys.stdout.buffer.write(msgspec.json.encode(study(question)))


if __name__ == "__main__":
    main()
