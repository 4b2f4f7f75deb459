"""Speculation of one session: what is drafted for its rows, and what became of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nesa_node.client.speculation.acceptance import (
    MAX_DRAFT_BY_SESSIONS,
    MAX_STEP_TOKENS,
    AcceptanceTable,
    StepTimes,
)
from nesa_node.client.speculation.drafts import Drafter, DraftKind, DraftSource

PROBE_INTERVAL_TOKENS = 32
"""A source that was not worth its time is tried again, with one token, after so many."""
PAUSE_TOKENS = 16
"""Tokens that are decoded without drafts before it is asked again whether they would pay."""
MARGIN = 1.25
"""By how much a drafted token has to pay for itself."""


@dataclass(slots=True)
class SpeculationTotals:
    """What speculation did in a session, or in all of a model."""

    steps: int = 0
    tokens: int = 0
    """Generated tokens."""
    seconds: float = 0.0
    """Duration of the steps, drafting included."""
    saved_s: float = 0.0
    """What one step for each token would have taken longer, by the measured times of steps."""
    drafted: Counter[DraftSource] = field(default_factory=Counter)
    accepted: Counter[DraftSource] = field(default_factory=Counter)

    def add(self, other: SpeculationTotals) -> None:
        self.steps += other.steps
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.saved_s += other.saved_s
        self.drafted.update(other.drafted)
        self.accepted.update(other.accepted)

    @property
    def gain(self) -> float:
        """How many times as fast the steps were as with one token each."""
        return (self.seconds + self.saved_s) / self.seconds if self.seconds else 1.0


@dataclass(slots=True)
class _DraftedRow:
    drafters: list[Drafter]
    kinds: list[DraftKind] = field(default_factory=list)
    """Of the tokens drafted last."""
    since_model: int = 0
    """Tokens since the draft model was asked last."""


class Speculator:
    """Drafts for the rows of one session, as many tokens as pay. Close it.

    Drafts are deterministic: the model's own choice at each position, greedy or sampled, is taken,
    and a drafted token is right where it is that choice. With a one-hot draft that is the rule of
    "Fast Inference from Transformers via Speculative Decoding" (Leviathan et al., 2023): a token is
    accepted with the probability that the model gives it, and what stands in place of a rejected
    one has the model's distribution without it. Text and random numbers are those of decoding
    without drafts.
    """

    def __init__(
        self,
        rows: int,
        new_drafters: Callable[[], list[Drafter]],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.totals = SpeculationTotals()
        self._rows = [_DraftedRow(new_drafters()) for _ in range(rows)]
        self._acceptance = AcceptanceTable()
        self._times = StepTimes()
        self._clock = clock
        self._num_decoding = 0
        self._alive = rows
        self._draft_s = 0.0
        """What drafting for the next step took."""
        self._model_token_s = 0.0
        """What drafting a token by a model takes."""

    def append_prompt(self, row: int, tokens: Sequence[int]) -> None:
        """Set the row's text before its first token."""
        for drafter in self._rows[row].drafters:
            drafter.append(tokens)

    def begin_step(self, alive: int) -> None:
        """Begin a step of `alive` rows, whose drafts are asked for next."""
        self._alive = alive
        self._draft_s = 0.0

    def draft(self, row: int, room: int) -> list[int]:
        """At most `room` tokens that may follow the row's text; empty where they would not pay."""
        state = self._rows[row]
        state.kinds = []
        most = min(room, self._limit)
        if most <= 0 or not self._times.is_known:
            return []
        began = self._clock()
        tokens: list[int] = []
        for drafter in self._order(state):
            tokens = self._take(state, drafter, most)
            if tokens:
                break
        self._draft_s += self._clock() - began
        return tokens

    def record(self, row: int, draft: Sequence[int], generated: Sequence[int]) -> None:
        """Record which tokens the model `generated` where `draft` was drafted."""
        state = self._rows[row]
        for kind, drafted, token in zip(state.kinds, draft, generated, strict=False):
            is_right = drafted == token
            self._acceptance.record(kind, is_right)
            self.totals.drafted[kind.source] += 1
            self.totals.accepted[kind.source] += is_right
        unseen = len(draft) - len(generated)
        if unseen > 0:
            self.totals.drafted[state.kinds[-1].source] += unseen
        self._append(state, generated, is_observed=bool(draft))
        state.since_model += len(generated)

    def end_step(self, sent: int, generated: int, seconds: float, num_decoding: int) -> None:
        """Record a step of `sent` tokens in all rows, which generated `generated` in `seconds`.

        `num_decoding` is how many sessions decode at the busiest node; 0: unknown.
        """
        self._num_decoding = num_decoding
        self._times.record(sent, generated, seconds, self._draft_s)
        totals, spent_s = self.totals, seconds + self._draft_s
        totals.steps += 1
        totals.tokens += generated
        totals.seconds += spent_s
        if sent > self._alive:
            # Each row would have had a step for each of its tokens.
            steps = generated / max(self._alive, 1)
            totals.saved_s += steps * self._times.single_s(self._alive) - spent_s

    def pause_tokens(self) -> int:
        """How many tokens to decode without asking for drafts, which do not pay now; 0: none."""
        if not self._times.is_known:
            return 1
        if self._limit <= 0:
            return PAUSE_TOKENS
        return 0 if any(map(self._may_pay, self._rows[0].drafters)) else PAUSE_TOKENS

    def record_plain(
        self, row: int, tokens: Sequence[int], seconds: float, num_decoding: int
    ) -> None:
        """Record tokens of a session of one row that were generated one at a time."""
        self._num_decoding = num_decoding
        if not tokens:
            return
        self._times.record(1, 1, seconds / len(tokens))
        self.totals.steps += len(tokens)
        self.totals.tokens += len(tokens)
        self.totals.seconds += seconds
        state = self._rows[row]
        self._append(state, tokens, is_observed=False)
        state.since_model += len(tokens)

    def close(self) -> None:
        """Release the drafters."""
        for row in self._rows:
            for drafter in row.drafters:
                drafter.close()

    @property
    def _limit(self) -> int:
        """Most tokens to draft for each row."""
        shared = MAX_DRAFT_BY_SESSIONS.get(self._num_decoding, 0)
        return min(shared, MAX_STEP_TOKENS // max(self._alive, 1) - 1)

    def _order(self, state: _DraftedRow) -> list[Drafter]:
        """The row's drafters, the likeliest to be right first."""
        return sorted(state.drafters, key=self._next_chance, reverse=True)

    def _next_chance(self, drafter: Drafter) -> float:
        """Chance that the drafter's next token is right; of a model, which is not asked, usual."""
        if drafter.source == "model":
            return self._acceptance.mean_chance("model")
        kind = next((kind for _, kind in drafter.draft()), None)
        return 0.0 if kind is None else self._acceptance.chance(kind)

    def _may_pay(self, drafter: Drafter) -> bool:
        """Whether a drafter's next token may be worth its time."""
        if drafter.source == "model":
            return self._pays(self._acceptance.mean_chance("model"), self._model_token_s)
        # A match of sixteen tokens or more may come at any time.
        return self._pays(self._acceptance.chance(DraftKind("lookup", 5)), 0.0)

    def _take(self, state: _DraftedRow, drafter: Drafter, most: int) -> list[int]:
        """Tokens of one drafter, as long as each is likely enough to pay for itself."""
        if drafter.source == "model":
            return self._take_from_model(state, drafter, most)
        return self._take_likely(state, drafter, most, cost_s=0.0)

    def _take_from_model(self, state: _DraftedRow, drafter: Drafter, most: int) -> list[int]:
        pays = self._pays(self._acceptance.mean_chance("model"), self._model_token_s)
        if not pays and state.since_model < PROBE_INTERVAL_TOKENS:
            return []
        state.since_model = 0
        before, began = len(state.kinds), self._clock()
        tokens = self._take_likely(
            state, drafter, most if pays else 1, cost_s=self._model_token_s, is_probe=not pays
        )
        # One more token was drafted where it was not likely enough.
        spent_s = (self._clock() - began) / max(len(state.kinds) - before, 1)
        rate = 0.2 if self._model_token_s else 1.0
        self._model_token_s += rate * (spent_s - self._model_token_s)
        return tokens

    def _take_likely(
        self,
        state: _DraftedRow,
        drafter: Drafter,
        most: int,
        *,
        cost_s: float,
        is_probe: bool = False,
    ) -> list[int]:
        tokens: list[int] = []
        chance = 1.0
        for token, kind in drafter.draft():
            chance *= self._acceptance.chance(kind)
            if not (is_probe or self._pays(chance, cost_s)):
                break
            tokens.append(token)
            state.kinds.append(kind)
            if len(tokens) == most:
                break
        return tokens

    def _pays(self, chance: float, cost_s: float) -> bool:
        """Whether a drafted token that is right by this chance saves more than it costs."""
        times = self._times
        # What a token takes now, drafts that do not pay left out.
        saved_s = min(times.token_s, times.single_s(self._alive) / self._alive)
        return chance * saved_s > MARGIN * (times.slope_s + cost_s)

    def _append(self, state: _DraftedRow, tokens: Sequence[int], *, is_observed: bool) -> None:
        """Append generated tokens to the text, and learn from what lookup would have drafted."""
        for drafter in state.drafters:
            # Where nothing would be drafted, learning is not worth its time.
            if drafter.source != "lookup" or is_observed or self._limit <= 0:
                drafter.append(tokens)
                continue
            for token in tokens:
                for drafted, kind in drafter.draft():
                    self._acceptance.record(kind, drafted == token)
                    break
                drafter.append([token])
