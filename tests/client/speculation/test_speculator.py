"""How much is drafted follows what drafts bring and cost, down to nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from nesa_node.client.speculation.acceptance import MAX_DRAFT_TOKENS
from nesa_node.client.speculation.drafts import Drafter, DraftSource, DraftToken
from nesa_node.client.speculation.speculator import PAUSE_TOKENS, Speculator
from tests.client.speculation.scripted_drafter import SURE, Clock


@dataclass
class DraftsZeros:
    """A draft model that takes `token_s` for each token, all of which are 0."""

    clock: Clock
    token_s: float
    source: DraftSource = "model"
    asked: int = 0
    text: list[int] = field(default_factory=list)

    def append(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def draft(self) -> Iterator[DraftToken]:
        while True:
            self.clock.now += self.token_s
            self.asked += 1
            yield 0, SURE

    def close(self) -> None:
        self.text = []


class Simulation:
    """A session of one row: each drafted token is right with the same chance."""

    def __init__(
        self,
        *,
        chance: float,
        single_s: float,
        slope_s: float,
        draft_s: float = 0.0,
        num_decoding: int = 1,
        seed: int = 0,
    ) -> None:
        self.clock = Clock()
        self.drafter = DraftsZeros(self.clock, draft_s)
        self._chance, self._single_s, self._slope_s = chance, single_s, slope_s
        self._num_decoding = num_decoding
        self._rng = random.Random(seed)

        def new_drafters() -> list[Drafter]:
            return [self.drafter]

        self.speculator = Speculator(1, new_drafters, clock=self.clock)
        self.lengths: list[int] = []

    def run(self, tokens: int) -> float:
        """Seconds for each token."""
        began, done = self.clock.now, 0
        while done < tokens:
            self.speculator.begin_step(1)
            draft = self.speculator.draft(0, 100)
            self.lengths.append(len(draft))
            right = 0
            while right < len(draft) and self._rng.random() < self._chance:
                right += 1
            generated = [0] * right + [1]
            seconds = self._single_s + self._slope_s * len(draft)
            self.clock.now += seconds
            self.speculator.record(0, draft, generated)
            self.speculator.end_step(len(draft) + 1, len(generated), seconds, self._num_decoding)
            done += len(generated)
        return (self.clock.now - began) / done


@pytest.mark.parametrize("draft_s", [0.0, 0.003])
@pytest.mark.parametrize("slope_s", [0.001, 0.004])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 0.8, 0.95])
def test_a_distant_swarm_is_never_slower_and_as_fast_as_drafts_allow(
    chance: float, slope_s: float, draft_s: float
) -> None:
    """Within 15 % of the best constant length, and within 3 % of none where nothing is right."""
    sim = Simulation(chance=chance, single_s=0.12, slope_s=slope_s, draft_s=draft_s)
    found = sim.run(3000)

    def constant(length: int) -> float:
        generated = sum(chance**at for at in range(length + 1))
        return (0.12 + length * (slope_s + draft_s)) / generated

    assert found <= 0.12 * 1.03
    assert found <= 1.15 * min(map(constant, range(MAX_DRAFT_TOKENS + 1)))


def test_expensive_tokens_are_drafted_only_as_far_as_they_pay() -> None:
    """On one machine a further token costs half a step."""
    cheap = Simulation(chance=0.6, single_s=0.02, slope_s=0.0005)
    dear = Simulation(chance=0.6, single_s=0.02, slope_s=0.012)
    cheap.run(1000)
    assert dear.run(1000) <= 0.02 * 1.05
    assert sum(dear.lengths[-200:]) < 0.3 * sum(cheap.lengths[-200:])


@pytest.mark.parametrize(("num_decoding", "most"), [(1, 7), (2, 3), (3, 1), (4, 0), (16, 0)])
def test_busy_nodes_get_shorter_drafts_then_none(num_decoding: int, most: int) -> None:
    sim = Simulation(chance=1.0, single_s=0.1, slope_s=0.001, num_decoding=num_decoding)
    sim.run(200)
    assert max(sim.lengths[5:]) == most
    pause = sim.speculator.pause_tokens()
    assert pause == (0 if most else PAUSE_TOKENS)


def test_a_draft_model_that_is_always_wrong_is_asked_now_and_then() -> None:
    sim = Simulation(chance=0.0, single_s=0.03, slope_s=0.003, draft_s=0.01)
    sim.run(500)
    asked = sim.drafter.asked
    sim.run(320)
    assert 5 <= sim.drafter.asked - asked <= 20
    assert sim.speculator.pause_tokens() == PAUSE_TOKENS


def test_no_more_is_drafted_than_there_is_room_for() -> None:
    sim = Simulation(chance=1.0, single_s=0.1, slope_s=0.001)
    sim.run(50)
    sim.speculator.begin_step(1)
    assert len(sim.speculator.draft(0, 2)) == 2
    assert sim.speculator.draft(0, 0) == []


def test_the_gain_is_that_over_one_token_a_step() -> None:
    sim = Simulation(chance=0.8, single_s=0.1, slope_s=0.001)
    per_token_s = sim.run(2000)
    assert sim.speculator.totals.gain == pytest.approx(0.1 / per_token_s, rel=0.15)
    totals = sim.speculator.totals
    assert totals.accepted["model"] / totals.drafted["model"] < 0.8
