"""A node dies and nobody has its blocks: until somebody joins, or for as long as a client waits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import RouteName
from tests.client.local_models import random_ids
from tests.engine.tiny_models import BLOCKS
from tests.faults.bed import Bed
from tests.faults.runs import ROUTES, Blow, generate, holders, join_bed, run_with_blow
from tests.swarms import thirds

pytestmark = pytest.mark.slow

JOINS_AFTER_S = 5.0
RECOVERY_TIMEOUT_S = 4.0
MARGIN_S = 5.0


@contextmanager
def _joining_later(bed: Bed, spans: list[Span], after_s: float) -> Iterator[threading.Timer]:
    """Started by whoever enters; the context waits for the nodes that it brings."""
    timer = threading.Timer(after_s, bed.start, [spans])
    try:
        yield timer
    finally:
        timer.join()


@pytest.mark.parametrize("hops", [(1,), (0,), (2,), (0, 1), (1, 2)])
@pytest.mark.parametrize("routing", ROUTES)
def test_session_goes_on_through_a_node_that_joins_later(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, hops: tuple[int, ...]
) -> None:
    bed.start(thirds(BLOCKS))
    ids_BL = random_ids(1, 20, seed=len(hops))
    with (
        join_bed(bed, routing) as model,
        model.inference_session(128) as session,
        _joining_later(bed, [thirds(BLOCKS)[hop] for hop in hops], JOINS_AFTER_S) as joining,
    ):
        victims = [holders(bed, session)[hop] for hop in hops]

        def strike() -> None:
            bed.kill(*victims)
            joining.start()

        blow = Blow(after=random.Random(0).randint(1, 40), strike=strike)
        run_with_blow(alone, model, session, ids_BL, blow, f"joins {JOINS_AFTER_S:g} s later")
        assert blow.recovery_s() > JOINS_AFTER_S


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("routing", ROUTES)
def test_without_any_replica_the_error_names_the_blocks_in_time(
    bed: Bed, routing: RouteName, hop: int
) -> None:
    bed.start(thirds(BLOCKS))
    with (
        join_bed(bed, routing, recovery_timeout_s=RECOVERY_TIMEOUT_S) as model,
        model.inference_session(128) as session,
    ):
        victim = holders(bed, session)[hop]
        blow = Blow(after=7, strike=lambda: bed.kill(victim))
        with pytest.raises(MissingBlocksError, match=f"blocks {victim.span}") as failure:
            generate(model, random_ids(1, 20), session, streamer=blow)
        waited_s = time.monotonic() - blow.times[-1]
        assert failure.value.missing == ((victim.span.start, victim.span.end),)
        assert waited_s < RECOVERY_TIMEOUT_S + MARGIN_S
        assert session.closed


@pytest.mark.parametrize("routing", ROUTES)
def test_without_two_neighbours_the_error_names_the_blocks_of_both(
    bed: Bed, routing: RouteName
) -> None:
    bed.start(thirds(BLOCKS))
    with (
        join_bed(bed, routing, recovery_timeout_s=RECOVERY_TIMEOUT_S) as model,
        model.inference_session(128) as session,
    ):
        victims = holders(bed, session)[1:]
        blow = Blow(after=7, strike=lambda: bed.kill(*victims))
        with pytest.raises(MissingBlocksError) as failure:
            generate(model, random_ids(1, 20), session, streamer=blow)
        assert time.monotonic() - blow.times[-1] < RECOVERY_TIMEOUT_S + MARGIN_S
        missing = {block for start, end in failure.value.missing for block in range(start, end)}
        assert missing == {2, 3, 4, 5}


def test_open_without_a_node_for_some_blocks_names_them_in_time(bed: Bed) -> None:
    first, _, last = thirds(BLOCKS)
    bed.start([first, last])
    started = time.monotonic()
    with (
        join_bed(bed, "chain", recovery_timeout_s=RECOVERY_TIMEOUT_S) as model,
        pytest.raises(MissingBlocksError) as failure,
    ):
        model.inference_session(128)
    assert failure.value.missing == ((2, 4),)
    assert time.monotonic() - started < RECOVERY_TIMEOUT_S + MARGIN_S


@pytest.mark.parametrize(
    ("lost", "spans"),
    [
        ([1], [Span(2, 3), Span(3, 5)]),
        ([0, 1], [Span(0, 3), Span(3, 4)]),
        ([1, 2], [Span(1, 6)]),
        ([2], [Span(4, 5), Span(5, 6)]),
        ([0, 2], [Span(0, 1), Span(1, 2), Span(3, 6)]),
    ],
)
@pytest.mark.parametrize("routing", ROUTES)
def test_replacements_may_hold_other_spans(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, lost: list[int], spans: list[Span]
) -> None:
    bed.start(thirds(BLOCKS))
    with join_bed(bed, routing) as model, model.inference_session(128) as session:
        victims = [holders(bed, session)[hop] for hop in lost]
        bed.start(spans)
        blow = Blow(after=9, strike=lambda: bed.kill(*victims))
        run_with_blow(alone, model, session, random_ids(1, 20), blow, "other spans")


@pytest.mark.parametrize("routing", ROUTES)
def test_session_moves_to_other_spans_and_back(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
    bed.start(thirds(BLOCKS))
    ids_BL = random_ids(1, 20)
    with join_bed(bed, routing) as model, model.inference_session(128) as session:
        for spans in ([Span(0, 3), Span(3, 4)], [Span(0, 2), Span(2, 4)]):
            victims = holders(bed, session)[:2]
            bed.start(spans)
            blow = Blow(after=9, strike=partial(bed.kill, *victims))
            output_BL = run_with_blow(
                alone, model, session, ids_BL, blow, "other spans", new_tokens=20
            )
            assert [hop.span for hop in session.hops[:2]] == spans
            # Continue the text: what was sent before the first move must not be taken for all.
            ids_BL = torch.cat([output_BL, random_ids(1, 5, seed=1)], 1)


@pytest.mark.parametrize("routing", ROUTES)
def test_node_too_small_for_the_session_is_not_taken_for_the_last_word(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
    bed.start(thirds(BLOCKS))
    bed.start([Span(2, 4)], "--attn-cache-tokens", "96")
    joining = threading.Timer(3.0, bed.start, [[Span(2, 4)]])
    with join_bed(bed, routing) as model, model.inference_session(128) as session:
        victim = holders(bed, session)[1]

        def strike() -> None:
            bed.kill(victim)
            joining.start()

        run_with_blow(
            alone, model, session, random_ids(1, 20), Blow(9, strike), "too small, then another"
        )
        joining.join()


def test_replacement_that_the_node_before_cannot_reach_is_given_up(
    alone: PreTrainedModel, bed: Bed
) -> None:
    """One refuses streams of the other, as a firewall would; the client reaches both."""
    first, middle, last = thirds(BLOCKS)
    bed.start([first, middle, last])
    with join_bed(bed, "chain") as model, model.inference_session(128) as session:
        bed.start([last] * 2, "--deny-peers", holders(bed, session)[1].peer_id)
        bed.start([last])
        victim = holders(bed, session)[2]
        blow = Blow(9, lambda: bed.kill(victim))
        run_with_blow(alone, model, session, random_ids(1, 20), blow, "no way to the next")


@pytest.mark.parametrize("spare", ["middle", "last"])
def test_replacement_that_cannot_reach_the_node_after_it_is_given_up_or_that_one_is(
    alone: PreTrainedModel, bed: Bed, spare: str
) -> None:
    first, middle, last = thirds(BLOCKS)
    bed.start([first, middle])
    with join_bed(bed, "chain") as model:
        # Its key exists before the node does: the last one can be told to refuse it.
        bed.start([last], "--deny-peers", bed.peer_id(ahead=1))
        with model.inference_session(128) as session:
            bed.start([middle])
            victim = holders(bed, session)[1]

            def strike() -> None:
                bed.kill(victim)
                joining.start()

            joining = threading.Timer(3.0, bed.start, [[middle if spare == "middle" else last]])
            run_with_blow(
                alone, model, session, random_ids(1, 20), Blow(9, strike), "no way to the next"
            )
            joining.join()
