"""Study of stored snapshots in a process of its own: `python -m` this module PARENT_PID.

Reads a `StudyRequest` from standard input and writes `StudyResult` to standard output, both as
JSON. It runs at the lowest priority and ends with its parent process. The system ends it when it
exceeds its processor time.
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

from nesa_node.routing.placement.schema_library import encode_library, precompute_library
from nesa_node.routing.placement.score import Goal
from nesa_node.routing.tuner import SHIPPED_TUNING, parse_published, retune
from nesa_node.server.orchestrator.snapshot_store import read_snapshots

MAX_STUDIED_SNAPSHOTS = 1000
"""Newest snapshots that are studied."""
_LOWEST_PRIORITY = 19
_CPU_GRACE_S = 30
"""Additional processor time for starting and reading."""
_PARENT_CHECK_INTERVAL_S = 1.0


class StudyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`exponents` are those in use; each part may take about `seconds` of processor time."""

    store: str
    goal: Goal
    replicas: int
    seconds: float
    seed: int
    exponents: dict[str, float]


class StudyResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`exponents` are those to use from now on; `library` is a document of `encode_library`, or
    None.

    `tuning`, `cost_tuning` and `schemas` give the reasons in words: for the greedy rule, which the
    figures describe, for the weights of the default cost, and for schemas.
    """

    exponents: dict[str, float]
    tuning: str
    cost_tuning: str = ""
    gain: float = 0.0
    gain_error: float = 0.0
    learnt_from: int = 0
    held_out: int = 0
    candidates: int = 0
    library: str | None = None
    schemas: str
    regret: float | None = None


def study(request: StudyRequest) -> StudyResult:
    """Tune exponents and weights, precompute schemas. Raises `ConfigError` for a bad store."""
    snapshots = read_snapshots(Path(request.store), MAX_STUDIED_SNAPSHOTS)
    now = parse_published(request.exponents) or SHIPPED_TUNING
    tuned = retune(
        snapshots,
        np.random.default_rng((request.seed, 0)),
        current=now,
        seconds=request.seconds,
        clock=time.process_time,
    )
    schemas = precompute_library(
        snapshots,
        np.random.default_rng((request.seed, 1)),
        goal=request.goal,
        replicas=request.replicas,
        seconds=request.seconds,
        clock=time.process_time,
    )
    return StudyResult(
        exponents=tuned.tuning.published(),
        tuning=tuned.rule.reason,
        cost_tuning=tuned.weights.reason,
        gain=tuned.rule.gain,
        gain_error=tuned.rule.gain_error,
        learnt_from=tuned.rule.learnt_from,
        held_out=tuned.rule.held_out,
        candidates=tuned.rule.candidates,
        library=None if schemas.library is None else encode_library(schemas.library).decode(),
        schemas=schemas.reason,
        regret=schemas.regret,
    )


def _exit_with_parent(parent: int) -> None:
    """Exit when the parent process is gone: a killed parent cannot end this process."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_INTERVAL_S)
    os._exit(1)


def main() -> None:
    threading.Thread(target=_exit_with_parent, args=(int(sys.argv[1]),), daemon=True).start()
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=StudyRequest)
    os.nice(_LOWEST_PRIORITY)
    most_s = int(2 * question.seconds) + _CPU_GRACE_S
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))
    sys.stdout.buffer.write(msgspec.json.encode(study(question)))


if __name__ == "__main__":
    main()
