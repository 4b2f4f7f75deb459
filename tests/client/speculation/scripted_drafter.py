"""Drafters for tests: the right text with mistakes in it, and models of their own choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from nesa_node.client.speculation.drafting import Drafting
from nesa_node.client.speculation.drafts import DraftKind, DraftSource, DraftToken
from nesa_node.core.ids import ModelId

SURE = DraftKind("model", 7)


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
    counts = {
        sample.labels[1:]: sample.value
        for sample in drafting.samples()
        if sample.metric.name == "nesa_draft_tokens_total"
    }
    right = sum(int(n) for (_, told), n in counts.items() if told == "accepted")  # type: ignore
    return right, sum(map(int, counts.values()))  # type: ignore[arg-type]


Draft = Callable[[], Drafting]
