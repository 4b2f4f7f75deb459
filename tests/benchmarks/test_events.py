from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.events import KINDS, choose_event, longest_wait
from nesa_node.core.ids import Span

FIRST, LAST = Span(0, 2), Span(2, 4)


def test_no_span_loses_its_last_node() -> None:
    rng = random.Random(0)
    for _ in range(200):
        event = choose_event(rng, {FIRST: ["a"], LAST: ["b", "c"]}, most_nodes=4)
        assert event.kind == "add" or event.span == LAST


def test_a_full_swarm_is_not_added_to() -> None:
    rng = random.Random(0)
    serving = {FIRST: ["a", "b"], LAST: ["c", "d"]}
    kinds = Counter(choose_event(rng, serving, most_nodes=4).kind for _ in range(200))
    assert set(kinds) == {"kill", "drain"}
    kinds = Counter(choose_event(rng, serving, most_nodes=5).kind for _ in range(600))
    assert set(kinds) == set(KINDS)
    assert all(count > 150 for count in kinds.values())


def test_seed_decides_the_events() -> None:
    serving = {FIRST: ["a", "b"], LAST: ["c", "d"]}
    runs = [
        [choose_event(rng, serving, most_nodes=6) for _ in range(20)]
        for rng in (random.Random(3), random.Random(3), random.Random(4))
    ]
    assert runs[0] == runs[1] != runs[2]


def test_nothing_possible_is_refused() -> None:
    with pytest.raises(ValueError, match="single node"):
        choose_event(random.Random(0), {FIRST: ["a"]}, most_nodes=1)


def test_wait_counts_where_it_overlaps_the_event() -> None:
    times = [0.0, 1.0, 1.5, 4.5, 5.0, 9.0]
    assert longest_wait(times, 1.2, 3.0) == 3.0
    assert longest_wait(times, 2.0, 2.1) == 3.0, "the event fell into the wait"
    assert longest_wait(times, 4.5, 5.0) == 0.5
    assert longest_wait(times, 4.6, 5.1) == 4.0
    assert longest_wait(times, 9.0, 20.0) is None
    assert longest_wait([1.0], 0.0, 2.0) is None
