"""Whom a node obeys, judged in a swarm of known worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.core.ids import PeerId, Span
from nesa_node.server.orchestrator.placement_filter import PlacementFilter
from nesa_node.server.orchestrator.swarm_score import (
    SwarmScore,
)
from nesa_node.swarm.dht.sealing import PlacementNotice
from nesa_node.topology.links.matrix import assemble_links
from nesa_node.topology.snapshot import Snapshot
from tests.server.small_swarm import (
    BLOCKS,
    BOSS,
    EVEN,
    ME,
    NOW,
    RIVAL,
    STRANGER,
    TO_SECOND,
    TORN,
    UNEVEN,
    A,
    B,
    C,
    appraise,
    node,
    placement,
    swarm,
)
from tests.swarm.notice_fields import PEERS


def test_gain_that_the_node_finds_itself_is_reason_to_obey_a_stranger() -> None:
    found = node().first_accepted([placement(*TO_SECOND)], swarm(UNEVEN))
    assert found is not None
    assert (found[1].span, found[1].reason) == (Span(4, 8), "recomputed")


def test_repair_of_a_loss_is_reason_to_obey_a_stranger() -> None:
    found = node().first_accepted([placement(*TO_SECOND, repairs=4)], swarm(TORN))
    assert found is not None
    assert found[1].reason == "recomputed"


def test_second_holder_is_reason_enough_to_obey_a_stranger() -> None:
    """Nothing gets faster by it: the node is slow."""
    nodes = [
        replace(each, decode_tokens_per_s=0.01) if each.peer_id == ME else each
        for each in swarm(UNEVEN).nodes
    ]
    slow = replace(swarm(UNEVEN), nodes=tuple(nodes))
    found = node().first_accepted([placement((ME, (0, 4), (4, 8)), gain=0.0)], slow)
    assert found is not None
    assert found[1].reason == "recomputed"
    thick = placement((ME, (0, 4), (4, 8)), gain=0.0, seq=2)
    obedience = node()
    assert obedience.first_accepted([thick], swarm({**EVEN, PeerId(PEERS[8]): (0, 4)})) is None
    assert obedience.refused == {"no_gain": 1}


def test_move_without_a_gain_is_made_for_an_allowed_signer_only() -> None:
    """An operator may know what the node cannot see."""
    sideways = placement((ME, (0, 4), (2, 6)), gain=0.1)
    five = {**EVEN, PeerId(PEERS[5]): (2, 6)}
    obedience = node(BOSS)
    assert obedience.first_accepted([sideways], swarm(five)) is None
    assert obedience.refused == {"no_gain": 1}
    found = obedience.first_accepted(
        [placement((ME, (0, 4), (2, 6)), gain=0.1, signer=BOSS)], swarm(five)
    )
    assert found is not None
    assert found[1].reason == "allowed"


def test_move_that_rides_along_with_a_good_one_is_refused() -> None:
    spans = {**UNEVEN, PeerId(PEERS[6]): (0, 4)}
    both = placement((A, (0, 4), (4, 8)), (ME, (0, 4), (0, 3)), gain=0.5)
    obedience = node()
    assert obedience.first_accepted([both], swarm(spans)) is None
    assert obedience.refused == {"no_gain": 1}


def test_last_holder_stays_even_for_an_allowed_signer() -> None:
    spans = {ME: (0, 4), A: (4, 8), B: (4, 8), C: (4, 8)}
    swap = placement((ME, (0, 4), (4, 8)), (A, (4, 8), (0, 4)), signer=BOSS, gain=0.0)
    obedience = node(BOSS)
    assert obedience.first_accepted([swap], swarm(spans)) is None
    assert obedience.refused == {"uncovered": 1}
    # Once the other has come, it is free to go.
    come = {**spans, A: (0, 4)}
    assert obedience.first_accepted([swap], swarm(come)) is not None
    assert not obedience.distrusted


def test_what_does_not_fit_into_memory_is_refused() -> None:
    obedience = node(BOSS, max_blocks=3)
    assert obedience.first_accepted([placement(*TO_SECOND, signer=BOSS)], swarm(UNEVEN)) is None
    assert obedience.refused == {"no_memory": 1}


def test_plan_from_another_span_is_outdated_and_no_lie() -> None:
    obedience = node(BOSS, seen=swarm(UNEVEN))
    late = placement((ME, (1, 5), (4, 8)), signer=BOSS, gain=0.9)
    assert obedience.first_accepted([late], swarm(UNEVEN)) is None
    assert obedience.refused == {"outdated": 1}
    assert not obedience.distrusted


def test_refusal_is_counted_once_per_placement() -> None:
    obedience = node(max_blocks=1)
    for _ in range(5):
        obedience.first_accepted([placement(*TO_SECOND)], swarm(UNEVEN))
    assert obedience.refused == {"no_memory": 1}
    obedience.first_accepted([placement(*TO_SECOND, seq=2)], swarm(UNEVEN))
    assert obedience.refused == {"no_memory": 2}


@pytest.mark.parametrize("signer", [STRANGER, BOSS])
@pytest.mark.parametrize(
    ("absurd", "seen"),
    [
        (placement((ME, (0, 4), (4, 8)), gain=0.99), EVEN),
        (placement((ME, (0, 4), (4, 8)), gain=1e6), UNEVEN),
        (placement(*((p, UNEVEN[p], (4, 8)) for p in (ME, A, B)), gain=0.9), UNEVEN),
        (placement((ME, (0, 4), (8, 12)), num_blocks=12), UNEVEN),
    ],
    ids=["gain", "more than all", "everybody to one span", "beyond the model"],
)
def test_first_lie_is_remembered(
    absurd: PlacementNotice, seen: Mapping[PeerId, tuple[int, int]], signer: PeerId
) -> None:
    obedience = node(BOSS, seen=swarm(seen))
    lie = absurd.model_copy(update={"peer_id": signer})
    assert obedience.first_accepted([lie], swarm(seen)) is None
    assert obedience.refused == {"absurd": 1}
    assert set(obedience.distrusted) == {signer}
    honest = placement(*TO_SECOND, signer=signer, seq=2)
    assert obedience.first_accepted([honest], swarm(UNEVEN)) is None
    assert obedience.refused == {"absurd": 1, "liar": 1}
    assert (
        obedience.first_accepted([placement(*TO_SECOND, signer=RIVAL)], swarm(UNEVEN)) is not None
    )


def test_plan_that_a_death_made_wrong_is_no_lie() -> None:
    """It was true when it was made: the others that held the first half have died since."""
    obedience = node(seen=swarm(UNEVEN))
    now = swarm({ME: (0, 4), C: (4, 8)}, NOW + 20)
    assert obedience.first_accepted([placement(*TO_SECOND)], now) is None
    assert obedience.refused == {"doubtful": 1}
    assert not obedience.distrusted


def test_higher_epoch_is_considered_first_and_lower_ones_are_stale_then() -> None:
    obedience = node(BOSS, RIVAL)
    old = placement(*TO_SECOND, signer=BOSS, epoch=3)
    new = placement((ME, (0, 4), (3, 7)), signer=RIVAL, epoch=4, gain=0.0)
    found = obedience.first_accepted([old, new], swarm(UNEVEN))
    assert found is not None
    assert found[0] is new
    assert obedience.first_accepted([old], swarm(UNEVEN)) is None
    assert obedience.refused == {"stale_epoch": 1}


def test_strangers_number_is_no_reason_to_refuse_an_allowed_signer() -> None:
    obedience = node(BOSS)
    far = placement(*TO_SECOND, signer=STRANGER, epoch=10**9)
    assert obedience.first_accepted([far], swarm(UNEVEN)) is not None
    near = placement(*TO_SECOND, signer=BOSS, epoch=1)
    found = obedience.first_accepted([far, near], swarm(UNEVEN))
    assert found is not None
    assert found[0] is near


def _stranger(index: int) -> PeerId:
    return PeerId(f"{PEERS[0][:-4]}{index:04d}".replace("0", "z"))


def test_copy_with_a_high_epoch_does_not_silence_honest_strangers() -> None:
    obedience = node(seen=swarm(UNEVEN))
    copy = placement(*TO_SECOND, epoch=10**9)
    assert obedience.first_accepted([copy], swarm(UNEVEN)) is not None
    honest = placement(*TO_SECOND, signer=RIVAL, epoch=4)
    found = obedience.first_accepted([honest], swarm(UNEVEN))
    assert found is not None
    assert found[0] is honest
    # A signer's own epochs rise.
    assert obedience.first_accepted([placement(*TO_SECOND, epoch=5)], swarm(UNEVEN)) is None
    assert obedience.refused == {"stale_epoch": 1}


def test_pictures_are_remembered_without_their_links() -> None:
    """Yet lies are told from them with the links that are known now."""
    links = assemble_links({ME: (), A: (), B: (), C: ()})
    with_links: list[bool] = []

    def note(snapshot: Snapshot) -> SwarmScore:
        with_links.append(snapshot.links is not None)
        return appraise(snapshot)

    obedience = PlacementFilter(ME, note, num_blocks=BLOCKS, max_blocks=4)
    now = replace(swarm(EVEN), links=links)
    obedience.remember_snapshot(now)
    assert all(picture.links is None for picture in obedience._snapshots)
    lie = placement((ME, (0, 4), (4, 8)), gain=0.99)
    assert obedience.first_accepted([lie], now) is None
    assert obedience.refused == {"absurd": 1}
    assert all(with_links)


def test_epoch_counts_only_as_long_as_what_was_asked_with_it() -> None:
    obedience = node(BOSS, RIVAL)
    gone = placement(*TO_SECOND, signer=BOSS, epoch=9)
    assert obedience.first_accepted([gone], swarm(UNEVEN)) is not None
    later = placement(*TO_SECOND, signer=RIVAL, epoch=4, expires_at=NOW + 200)
    assert obedience.first_accepted([later], swarm(UNEVEN)) is None
    assert obedience.first_accepted([later], swarm(UNEVEN, gone.expires_at + 1)) is not None


def test_few_strangers_are_weighed_in_a_round_and_each_has_a_turn() -> None:
    appraised = 0

    def count(snapshot: Snapshot) -> SwarmScore:
        nonlocal appraised
        appraised += 1
        return appraise(snapshot)

    obedience = PlacementFilter(
        ME, count, num_blocks=BLOCKS, max_blocks=4, allowed=frozenset({BOSS})
    )
    useless = (ME, (0, 4), (1, 4))
    flood = [placement(useless, signer=_stranger(i), gain=0.0, epoch=10**9) for i in range(31)]
    honest = placement(*TO_SECOND, signer=RIVAL)
    now = swarm(UNEVEN)
    rounds = 0
    found = None
    while found is None:
        due = obedience.select_due([*flood, honest], now)
        assert len(due) <= 4
        before = appraised
        found = obedience.first_accepted(due, now)
        assert appraised - before <= 9
        rounds += 1
    assert found[0] is honest
    assert rounds <= 8
    allowed = placement(*TO_SECOND, signer=BOSS)
    assert allowed in obedience.select_due([*flood, honest, allowed], now)


def test_refused_placement_is_weighed_again_once_the_swarm_has_changed() -> None:
    obedience = node()
    useless = placement((ME, (0, 4), (1, 4)), gain=0.0)
    others = placement((A, (0, 4), (4, 8)), signer=RIVAL)
    assert obedience.select_due([useless, others], swarm(UNEVEN)) == [useless]
    obedience.first_accepted([useless], swarm(UNEVEN))
    assert obedience.select_due([useless, others], swarm(UNEVEN)) == []
    assert obedience.select_due([useless], swarm(EVEN)) == [useless]
    newer = placement((ME, (0, 4), (1, 4)), gain=0.0, seq=2)
    assert obedience.select_due([newer], swarm(UNEVEN)) == [newer]
    assert obedience.select_due([newer], swarm(UNEVEN, NOW + 600)) == [newer]


spans = st.tuples(st.integers(0, 7), st.integers(1, 4)).map(lambda s: (s[0], min(s[0] + s[1], 8)))
peers = st.sampled_from([ME, A, B, C, PeerId(PEERS[7])])


@st.composite
def plans(draw: st.DrawFn) -> tuple[dict[PeerId, tuple[int, int]], list[PlacementNotice]]:
    held = draw(st.dictionaries(peers, spans, min_size=1))
    made = []
    for _ in range(draw(st.integers(0, 4))):
        wanted = draw(st.dictionaries(peers, spans, min_size=1))
        made.append(
            placement(
                *((peer, held.get(peer, draw(spans)), to) for peer, to in wanted.items()),
                gain=draw(st.floats(-1, 2) | st.just(1e6)),
                signer=draw(st.sampled_from([BOSS, RIVAL, STRANGER])),
                epoch=draw(st.integers(0, 10)),
            )
        )
    return held, made


@given(plans())
def test_no_plan_makes_a_node_give_up_what_nobody_else_serves(
    drawn: tuple[dict[PeerId, tuple[int, int]], list[PlacementNotice]],
) -> None:
    held, made = drawn
    now = swarm(held)
    obedience = node(BOSS, seen=now)
    found = obedience.first_accepted(made, now)
    if found is None or found[1].span is None:
        return
    to = found[1].span
    assert len(to) <= 4
    assert to.end <= BLOCKS
    before = now.coverage()
    others = now.without_peers(ME).coverage()
    after = [count + (to.start <= b < to.end) for b, count in enumerate(others)]
    assert all(now_ > 0 for was, now_ in zip(before, after, strict=True) if was > 0)


def test_memory_of_signers_is_bounded() -> None:
    obedience = node(seen=swarm(EVEN))
    for index in range(3000):
        name = f"{PEERS[0][:-4]}{index:04d}".replace("0", "z")
        lie = placement((ME, (0, 4), (4, 8)), gain=0.99, signer=PeerId(name))
        obedience.first_accepted([lie], swarm(EVEN))
    assert len(obedience.distrusted) <= 1024
    assert len(obedience._counted_reasons) <= 64


@pytest.mark.parametrize(("gain", "obeyed"), [(0.05, False), (0.12, True)])
def test_a_stranger_is_obeyed_for_a_gain_of_ten_percent(gain: float, obeyed: bool) -> None:
    def appraise(snapshot: Snapshot) -> SwarmScore:
        moved = any(n.peer_id == ME and n.span == Span(4, 8) for n in snapshot.nodes)
        return SwarmScore(0, 0, 1.0 - gain if moved else 1.0, 1.0, 0)

    judge = PlacementFilter(ME, appraise, num_blocks=BLOCKS, max_blocks=4, allowed=frozenset())
    found = judge.first_accepted([placement(*TO_SECOND, gain=gain)], swarm(UNEVEN))
    assert (found is not None) == obeyed


def test_a_stranger_is_not_obeyed_for_a_gain_that_exposes_blocks() -> None:
    def appraise(snapshot: Snapshot) -> SwarmScore:
        moved = any(n.peer_id == ME and n.span == Span(4, 8) for n in snapshot.nodes)
        return SwarmScore(0, 0, 0.5, 1.0, 4) if moved else SwarmScore(0, 0, 1.0, 1.0, 0)

    judge = PlacementFilter(ME, appraise, num_blocks=BLOCKS, max_blocks=4, allowed=frozenset())
    assert judge.first_accepted([placement(*TO_SECOND, gain=0.5)], swarm(UNEVEN)) is None


@pytest.mark.parametrize(
    ("after", "obeyed"),
    [
        (SwarmScore(0, 0, 1.05, 1.0, 0), True),
        (SwarmScore(0, 0, 1.0, 1.0, 4), False),
        (SwarmScore(0, 0, 1.2, 1.0, 0), False),
        (SwarmScore(0, 1, 1.0, 1.0, 0), False),
    ],
    ids=["spreads", "spreads nothing", "costs too much", "takes a replica"],
)
def test_a_stranger_is_obeyed_for_spreading_holders(after: SwarmScore, obeyed: bool) -> None:
    def appraise(snapshot: Snapshot) -> SwarmScore:
        moved = any(n.peer_id == ME and n.span == Span(4, 8) for n in snapshot.nodes)
        return after if moved else SwarmScore(0, 0, 1.0, 1.0, 4)

    judge = PlacementFilter(ME, appraise, num_blocks=BLOCKS, max_blocks=4, allowed=frozenset())
    found = judge.first_accepted([placement(*TO_SECOND, gain=0.0)], swarm(UNEVEN))
    assert (found is not None) == obeyed
    assert not judge.distrusted
