"""How a model's sessions draft, and what became of all their drafts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

from nesa_node.client.speculation.drafts import Drafter, DraftSource, LookupDrafter
from nesa_node.client.speculation.speculator import SpeculationTotals, Speculator
from nesa_node.core.decision_log import DecisionLog, LoggedDecision
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import DRAFT_TOKENS, SPECULATION_SAVED, MetricSample

log = get_logger(__name__)


class Drafting:
    """Opens the speculation of each session: by lookup, and by a draft model if there is one.

    Thread-safe. Close it.
    """

    def __init__(
        self,
        model_id: ModelId,
        *,
        new_model_drafter: Callable[[], Drafter] | None = None,
        close_model: Callable[[], None] = lambda: None,
        decisions: DecisionLog | None = None,
    ) -> None:
        """`decisions` gets what became of each session's drafts, for `nesa-node explain`."""
        self._model_id = model_id
        self._new_model_drafter = new_model_drafter
        self._decisions = decisions
        self._guard = threading.Lock()
        self._totals = SpeculationTotals()
        self.close = close_model
        """Release the draft model, after all sessions."""

    @contextmanager
    def speculate(
        self, session_id: bytes, prompts: Sequence[Sequence[int]]
    ) -> Iterator[Speculator]:
        """Context of the drafts for a session's rows, which begin with `prompts`."""
        speculator = Speculator(len(prompts), self._new_drafters)
        try:
            for row, prompt in enumerate(prompts):
                speculator.append_prompt(row, prompt)
            yield speculator
        finally:
            speculator.close()
            self._record(session_id, speculator.totals)

    def samples(self) -> Iterator[MetricSample]:
        """Prometheus samples of all sessions so far."""
        for source in get_args(DraftSource):
            drafted, accepted = self._totals.drafted[source], self._totals.accepted[source]
            labels = (self._model_id, source)
            yield MetricSample(DRAFT_TOKENS, (*labels, "accepted"), accepted)
            yield MetricSample(DRAFT_TOKENS, (*labels, "rejected"), drafted - accepted)
        yield MetricSample(SPECULATION_SAVED, (self._model_id,), self._totals.saved_s)

    def _new_drafters(self) -> list[Drafter]:
        drafters: list[Drafter] = [LookupDrafter()]
        if self._new_model_drafter is not None:
            drafters.append(self._new_model_drafter())
        return drafters

    def _record(self, session_id: bytes, totals: SpeculationTotals) -> None:
        if not totals.drafted.total():
            return
        with self._guard:
            self._totals.add(totals)
        if self._decisions is None or not session_id:
            return
        body = {
            "model": self._model_id,
            "steps": totals.steps,
            "tokens": totals.tokens,
            "seconds": totals.seconds,
            "gain": totals.gain,
            "drafted": dict(totals.drafted),
            "accepted": dict(totals.accepted),
        }
        try:
            self._decisions.add(LoggedDecision("speculation", session_id.hex(), time.time(), body))
        except OSError as error:
            log.warning("decision_not_logged", reason=str(error))
