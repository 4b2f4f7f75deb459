"""Drafters for tests: the right text with mistakes in it, and models of their own choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nesa_node.client.speculation.drafting import Drafting
from nesa_node.client.speculation.drafts import DraftKind, DraftSource, DraftToken
from nesa_node.core.ids import ModelId
from nesa_node.core.metrics import DRAFT_TOKENS

SURE = DraftKind("model", 7)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class ScriptedDrafter:
    """Knows how texts go on, but every `wrong_every`th token of a text is drafted wrongly."""

    source: DraftSource = "model"

    def __init__(self, texts: Sequence[Sequence[int]], wrong_every: int = 0) -> None:
        self._texts = texts
        self._wrong_every = wrong_every
        self._held: list[int] = []

    def append(self, tokens: Sequence[int]) -> None:
        self._held += tokens

    def draft(self) -> Iterator[DraftToken]:
        for text in self._texts:
            if list(text[: len(self._held)]) == self._held:
                for at, token in enumerate(text[len(self._held) :], len(self._held)):
                    wrong = self._wrong_every and at % self._wrong_every == 0
                    yield (token + 1) % 2 if wrong else token, SURE
                return

    def close(self) -> None:
        self._held = []


def scripted_drafting(texts: Sequence[Sequence[int]], wrong_every: int = 0) -> Drafting:
    """Drafting by a `ScriptedDrafter` in each row, and by lookup."""
    return Drafting(ModelId("tiny"), new_model_drafter=lambda: ScriptedDrafter(texts, wrong_every))


def accepted_and_drafted(drafting: Drafting) -> tuple[int, int]:
    """Of all sessions so far, from the samples for Prometheus."""
    right = drafted = 0
    for sample in drafting.samples():
        if sample.metric is DRAFT_TOKENS:
            assert isinstance(sample.value, int)
            drafted += sample.value
            right += sample.value * (sample.labels[-1] == "accepted")
    return right, drafted
