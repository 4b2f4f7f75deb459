"""Learning of an orchestrator from its stored snapshots.

`study` does the work in a child process; `Learner` starts it, keeps the result in a file
beside the snapshot store, and logs it as a decision.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from nesa_node.core.decision_log import DecisionLog, LoggedDecision
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.routing.placement.schema_library import decode_library
from nesa_node.routing.placement.schemas import SchemaLibrary
from nesa_node.routing.placement.score import Goal
from nesa_node.routing.tuner import COST_GENES, SHIPPED_TUNING, parse_published
from nesa_node.server.orchestrator.study import StudyRequest, StudyResult

log = get_logger(__name__)

LEARN_INTERVAL_S = 3600.0
STUDY_CPU_S = 120.0
"""Processor time for tuning, and as much for schemas."""
_STUDY_TIMEOUT_S = 3600.0
"""Longest wall time of a study, which runs at the lowest priority."""
_STUDY_MODULE = "nesa_node.server.orchestrator.study"
_MAX_FILE_BYTES = 8 << 20


class LearnedExponents(msgspec.Struct, frozen=True, kw_only=True):
    """Tuned values (`Tuning.published`): how often they were changed, when last, and why."""

    version: int = 0
    at: float = 0.0
    values: dict[str, float] = msgspec.field(default_factory=SHIPPED_TUNING.published)
    why: str = "as shipped"


class _LearnedFile(msgspec.Struct, frozen=True, kw_only=True):
    tuned: LearnedExponents
    library: str | None = None


class Learner:
    """Runs studies and keeps their results. Not thread-safe, except for `library`.

    `wall_clock` gives seconds since the Unix epoch. With `decisions` each result is logged there.
    """

    def __init__(
        self,
        model_id: ModelId,
        store: Path,
        *,
        goal: Goal,
        replicas: int,
        decisions: DecisionLog | None = None,
        seconds: float = STUDY_CPU_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.tuned = LearnedExponents()
        self._library: SchemaLibrary | None = None
        self._model_id = model_id
        self._store = store
        self._goal: Goal = goal
        self._replicas = replicas
        self._decisions = decisions
        self._seconds = seconds
        self._wall_clock = wall_clock

    def library(self) -> SchemaLibrary | None:
        """Schemas for this swarm; None while there are none worth using."""
        return self._library

    @property
    def path(self) -> Path:
        """File in which results outlive the process."""
        return self._store.with_suffix(".learnt.json")

    def load(self) -> None:
        """Load earlier results. An unreadable file is logged and left unchanged."""
        try:
            if not self.path.exists() or self.path.stat().st_size > _MAX_FILE_BYTES:
                return
            kept = msgspec.json.decode(self.path.read_bytes(), type=_LearnedFile)
            library = None if kept.library is None else decode_library(kept.library)
        except (OSError, msgspec.DecodeError, ConfigError, UnicodeDecodeError) as error:
            log.warning("study_result_not_loaded", file=str(self.path), reason=str(error))
            return
        if parse_published(kept.tuned.values) is not None:
            self.tuned = kept.tuned
        self._library = library

    async def learn(self) -> StudyResult | None:
        """Study the store once. Returns None, and changes nothing, if that failed."""
        if not self._store.exists():
            return None
        question = StudyRequest(
            store=str(self._store),
            goal=self._goal,
            replicas=self._replicas,
            seconds=self._seconds,
            seed=int(self._wall_clock()),
            exponents=self.tuned.values,
        )
        try:
            async with asyncio.timeout(_STUDY_TIMEOUT_S):
                answer = await _run_study(msgspec.json.encode(question))
            found = msgspec.json.decode(answer, type=StudyResult)
            library = None if found.library is None else decode_library(found.library)
        except (OSError, TimeoutError, msgspec.DecodeError, ConfigError) as error:
            log.warning("study_failed", reason=str(error) or "the study timed out")
            return None
        changed = self._adopt(found, library)
        log.info("study_finished", tuning=found.tuning, schemas=found.schemas, changed=changed)
        await asyncio.to_thread(self._save, found, changed)
        return found

    def _adopt(self, found: StudyResult, library: SchemaLibrary | None) -> bool:
        self._library = library
        if found.exponents == self.tuned.values or parse_published(found.exponents) is None:
            return False
        same_cost = all(
            self.tuned.values[name] == value
            for name, value in found.exponents.items()
            if name.startswith(COST_GENES.prefix)
        )
        self.tuned = LearnedExponents(
            version=self.tuned.version + 1,
            at=self._wall_clock(),
            values=found.exponents,
            why=(found.tuning if same_cost else f"default cost: {found.cost_tuning}")[:128],
        )
        return True

    def _save(self, found: StudyResult, changed: bool) -> None:
        at = self._wall_clock()
        body = {
            "model": self._model_id,
            "strategy": "homology-greedy",
            "published": changed,
            "reason": found.tuning,
            "cost_reason": found.cost_tuning,
            "exponents": dict(self.tuned.values),
            "version": self.tuned.version,
            "gain": found.gain,
            "gain_error": found.gain_error,
            "learnt_from": found.learnt_from,
            "held_out": found.held_out,
            "candidates": found.candidates,
            "schemas": found.schemas,
            "regret": found.regret,
        }
        try:
            draft = self.path.with_suffix(".draft")
            draft.write_bytes(
                msgspec.json.encode(_LearnedFile(tuned=self.tuned, library=found.library))
            )
            draft.replace(self.path)
            if self._decisions is not None:
                name = f"tuning-{self.tuned.version}-{int(at)}"
                self._decisions.add(LoggedDecision("tuning", name, at, body))
        except OSError as error:
            log.warning("study_result_not_saved", reason=str(error))


async def _run_study(request: bytes) -> bytes:
    """Run the study in a child process, which has ended on return. Raises `OSError`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", _STUDY_MODULE, str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # One thread: this machine has other work.
        env={**os.environ, "PYTHONPATH": _search_path(), "OMP_NUM_THREADS": "1"}
        | {"OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        answer, complaint = await process.communicate(request)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            # asyncio reports an exit only once all output is read, which `wait` does not do.
            await process.communicate()
    if process.returncode != 0:
        shown = complaint.decode(errors="replace").strip()[-200:]
        raise OSError(f"the study exited with status {process.returncode}: {shown}")
    return answer


def _search_path() -> str:
    given = os.environ.get("PYTHONPATH")
    ours = str(Path(__file__).parents[3])
    return os.pathsep.join([ours, *([given] if given else [])])
