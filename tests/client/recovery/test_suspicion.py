"""When a silent hop is given up, on a clock of the test's own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from nesa_node.client.recovery.suspicion import POLL_INTERVAL_S, HopState, Suspicion

HOP = "hop"
STEP_S = 0.05

Answers = Callable[[float], float]
"""When a probe is answered that was sent at a time; infinity: never."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Waiting:
    """A session that waits for an output, and looks as `Flow` does."""

    def __init__(
        self, *, step_s: float = STEP_S, steps: int = 20, replaceable: bool = True
    ) -> None:
        self.clock = Clock()
        self.suspicion = Suspicion(self.clock)
        self.replaceable = replaceable
        self.behind_s = 0.0
        self.heard = 0
        for _ in range(steps):
            self.suspicion.record_step(step_s)

    def wait(self, seconds: float, answers: Answers, name: str = HOP) -> float | None:
        """Wait for an output for so long; when the hop was given up, from the beginning."""
        began = self.clock.now
        self.clock.now += self.suspicion.late_after_s
        due: list[float] = []
        while self.clock.now < began + seconds:
            self.heard += sum(at <= self.clock.now for at in due)
            due = [at for at in due if at > self.clock.now]
            if self.suspicion.wants_probe(name):
                self.suspicion.record_probe(name, self.heard)
                due.append(answers(self.clock.now))
            state = self.suspicion.update(
                name,
                self.heard,
                replaceable=self.replaceable and name in self.suspicion.suspected,
                probe_transit_s=self.behind_s,
            )
            if state is HopState.LOST:
                return self.clock.now - began
            self.clock.now += POLL_INTERVAL_S
        return None

    def progress(self) -> None:
        self.suspicion.record_output([HOP])


def after(delay_s: float) -> Answers:
    return lambda sent_at: sent_at + delay_s


def never(_: float) -> float:
    return float("inf")


@pytest.mark.parametrize(
    ("step_s", "at_most_s"), [(0.005, 1.4), (0.05, 1.4), (0.2, 1.6), (0.5, 2.7), (5.0, 5.7)]
)
def test_silent_hop_is_lost_after_a_few_usual_answers(step_s: float, at_most_s: float) -> None:
    lost_s = Waiting(step_s=step_s).wait(30, never)
    assert lost_s is not None
    assert 1.0 < lost_s <= at_most_s


def test_silence_in_a_sessions_first_step_is_noticed() -> None:
    lost_s = Waiting(steps=0).wait(30, never)
    assert lost_s is not None
    assert lost_s <= 1.7


def test_silent_hop_without_a_replacement_gets_eight_seconds() -> None:
    lost_s = Waiting(replaceable=False).wait(30, never)
    assert lost_s is not None
    assert 8.0 <= lost_s <= 8.5


def test_long_step_of_a_hop_that_answers_raises_nothing() -> None:
    """Its own prefill, or the prefills of a queue of other sessions: the event loop answers."""
    waiting = Waiting()
    assert waiting.wait(600, after(0.2)) is None
    assert not waiting.suspicion.events


def test_hop_that_freezes_late_in_a_long_step_is_noticed_as_quickly() -> None:
    waiting = Waiting()
    froze_at = waiting.clock.now + 60.0
    lost_s = waiting.wait(90, lambda sent_at: sent_at + 0.01 if sent_at < froze_at else 1e9)
    assert lost_s is not None
    assert lost_s - 60.0 <= 0.5 + 1.0 + 3 * POLL_INTERVAL_S


def test_late_answer_withdraws_the_suspicion() -> None:
    waiting = Waiting()
    assert waiting.wait(0.9, after(0.5)) is None
    assert waiting.suspicion.events == Counter(raised=1, withdrawn=1)
    assert waiting.suspicion.state(HOP) is HopState.TRUSTED


def test_output_withdraws_the_suspicion() -> None:
    waiting = Waiting()
    waiting.wait(0.9, never)
    assert waiting.suspicion.suspected == {HOP}
    waiting.progress()
    assert waiting.suspicion.suspected == frozenset()
    assert waiting.suspicion.events == Counter(raised=1, withdrawn=1)


def test_who_answers_slowly_under_load_gets_more_time() -> None:
    """An answer after 0.9 s makes 3.6 s of silence tolerable."""
    waiting = Waiting()
    assert waiting.wait(1.4, after(0.9)) is None
    assert waiting.suspicion.lost_after_s == pytest.approx(4 * 0.9, abs=4 * POLL_INTERVAL_S)
    assert waiting.wait(3.0, after(2.5)) is None
    assert waiting.suspicion.events["confirmed"] == 0
    lost_s = waiting.wait(30, never)
    assert lost_s is not None
    assert lost_s <= 0.5 + 0.5 + 5.0 + POLL_INTERVAL_S


def test_slow_answers_are_forgotten_when_answers_are_quick_again() -> None:
    waiting = Waiting()
    waiting.wait(1.4, after(0.9))
    waiting.wait(20, after(0.01))
    assert waiting.suspicion.lost_after_s == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_jitter_of_a_busy_machine_costs_no_node(seed: int) -> None:
    """Answers of 20 ms that are 0.3 s in one of ten times and up to 0.9 s in one of a hundred."""
    rng = random.Random(seed)

    def jittery(sent_at: float) -> float:
        return sent_at + rng.choices((0.02, 0.3, rng.uniform(0.3, 0.9)), (90, 9, 1))[0]

    waiting = Waiting()
    for _ in range(60):
        assert waiting.wait(rng.uniform(0.05, 20.0), jittery) is None
        waiting.progress()
        waiting.suspicion.record_step(rng.uniform(0.02, 0.2))
    events = waiting.suspicion.events
    assert events["confirmed"] == 0
    assert events["raised"] == events["withdrawn"]


def test_time_in_which_this_process_did_not_run_counts_for_nothing() -> None:
    """It was stopped for a minute: what the hop said meanwhile has yet to be read."""
    waiting = Waiting()
    waiting.wait(0.5, never)
    waiting.clock.now += 60.0
    waiting.suspicion.record_oversleep(60.0)
    assert waiting.suspicion.update(HOP, 0, replaceable=True) is not HopState.LOST
    waiting.suspicion.record_oversleep(0.01)
    assert waiting.suspicion.now == pytest.approx(waiting.clock.now - 60.0)


def test_probe_behind_bytes_waits_for_their_way() -> None:
    waiting = Waiting()
    waiting.behind_s = 8.0
    lost_s = waiting.wait(60, never)
    assert lost_s is not None
    assert lost_s == pytest.approx(8.0 + 1.2, abs=0.2)


def test_part_of_a_large_output_is_a_sign_of_life() -> None:
    waiting = Waiting()
    waiting.wait(0.9, never)
    waiting.heard += 1000
    assert waiting.suspicion.update(HOP, waiting.heard, replaceable=True) is HopState.TRUSTED


def test_hops_that_left_the_chain_are_forgotten() -> None:
    waiting = Waiting()
    waiting.wait(0.9, never)
    waiting.suspicion.keep_only(["other"])
    assert waiting.suspicion.suspected == frozenset()
    assert waiting.suspicion.events == Counter(raised=1, confirmed=1)
