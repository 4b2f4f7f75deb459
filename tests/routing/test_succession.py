"""Leaders by lease in a simulated network: lost and late claims, crashes, partitions."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.routing.succession import (
    LeaseCandidate,
    LeaseClaim,
    LeaseTerms,
    find_leading_claim,
    rank_successors,
)

MODEL = ModelId("tiny@0")
TERMS = LeaseTerms(ttl_s=60.0, succession_delay_s=15.0)
LOOK_S = 5.0
MAX_DELAY_S = 10.0


@dataclass
class World:
    """Candidates that look every five seconds, with clocks of their own."""

    rng: random.Random
    size: int
    skew_s: float = 0.0
    now: float = 1000.0
    alive: set[int] = field(default_factory=set)
    side: dict[int, int] = field(default_factory=dict)
    history: list[tuple[float, frozenset[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peers = [PeerId(f"peer{i}") for i in range(self.size)]
        self.states = [LeaseCandidate(peer, MODEL) for peer in self.peers]
        self.seen: list[dict[PeerId, LeaseClaim]] = [{} for _ in self.peers]
        self.clocks = [self.rng.uniform(-self.skew_s, self.skew_s) for _ in self.peers]
        self.next_look = [self.now + self.rng.uniform(0, LOOK_S) for _ in self.peers]
        self.mail: list[tuple[float, int, LeaseClaim]] = []
        self.alive = set(range(self.size))
        self.side = dict.fromkeys(range(self.size), 0)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            self._deliver()
            for i in sorted(self.alive):
                if self.now >= self.next_look[i]:
                    self.next_look[i] += LOOK_S
                    self._look(i)
            self.history.append((self.now, frozenset(self.leaders())))

    def leaders(self) -> set[int]:
        return {i for i in self.alive if self.states[i].role == "leading"}

    def _look(self, i: int) -> None:
        now = self.now + self.clocks[i]
        self.states[i] = self.states[i].observe_claims(self.seen[i].values(), TERMS, now)
        state = self.states[i]
        claim = LeaseClaim(state.peer, state.role, state.epoch, now + TERMS.ttl_s)
        for j in self.alive - {i}:
            if self.side[i] == self.side[j]:
                self.mail.append((self.now + self.rng.uniform(0, MAX_DELAY_S), j, claim))

    def _deliver(self) -> None:
        due = [item for item in self.mail if item[0] <= self.now]
        self.mail = [item for item in self.mail if item[0] > self.now]
        for _, j, claim in due:
            known = self.seen[j].get(claim.signer)
            if known is None or known.expires_at < claim.expires_at:
                self.seen[j][claim.signer] = claim


def _settle(world: World) -> int:
    world.run(TERMS.ttl_s + TERMS.succession_delay_s * (world.size + 1) + 3 * MAX_DELAY_S + 30)
    leaders = world.leaders()
    assert len(leaders) == 1, leaders
    return leaders.pop()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 6))
def test_there_is_one_leader_soon_and_it_stays(seed: int, size: int) -> None:
    world = World(random.Random(seed), size, skew_s=10.0)
    leader = _settle(world)
    epoch = world.states[leader].epoch
    world.history.clear()
    world.run(1800)
    assert {leaders for _, leaders in world.history} == {frozenset({leader})}
    assert world.states[leader].epoch == epoch


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), size=st.integers(2, 6))
def test_next_in_order_follows_a_leader_that_dies_in_a_higher_epoch(seed: int, size: int) -> None:
    world = World(random.Random(seed), size, skew_s=1.0)
    dead = _settle(world)
    epoch = world.states[dead].epoch
    world.run(120)
    world.alive.discard(dead)
    follower = _settle(world)
    order = rank_successors(MODEL, [world.peers[i] for i in world.alive])
    assert world.peers[follower] == order[0]
    assert world.states[follower].epoch == epoch + 1
    # Who returns does not take it back.
    world.alive.add(dead)
    world.states[dead] = LeaseCandidate(world.peers[dead], MODEL)
    world.next_look[dead] = world.now
    assert _settle(world) == follower


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), size=st.integers(2, 6), data=st.data())
def test_after_a_partition_the_higher_epoch_leads_then_the_lower_peer_id(
    seed: int, size: int, data: st.DataObject
) -> None:
    world = World(random.Random(seed), size)
    _settle(world)
    for i in range(size):
        world.side[i] = data.draw(st.integers(0, 1))
    world.run(TERMS.ttl_s + TERMS.succession_delay_s * (size + 1) + 60)
    sides = set(world.side.values())
    leaders = world.leaders()
    assert len(leaders) == len(sides)
    expected = min(leaders, key=lambda i: (-world.states[i].epoch, world.peers[i]))
    world.side = dict.fromkeys(range(size), 0)
    world.history.clear()
    assert _settle(world) == expected
    # Nobody else led on the way: no flapping.
    assert frozenset.union(*(found for _, found in world.history)) <= leaders


def test_epochs_of_successive_leaders_rise() -> None:
    world = World(random.Random(1), 5)
    epochs = []
    while len(world.alive) > 1:
        leader = _settle(world)
        epochs.append(world.states[leader].epoch)
        world.alive.discard(leader)
    assert epochs == sorted(set(epochs))


def test_claims_of_ignored_signers_count_for_nothing() -> None:
    liar = PeerId("liar")
    claims = [LeaseClaim(liar, "leading", 2**40, 2000.0)]
    me = LeaseCandidate(PeerId("me"), MODEL)
    assert me.observe_claims(claims, TERMS, 1000.0).role == "ready"
    wiser = replace(me, ignored=frozenset({liar})).observe_claims(claims, TERMS, 1000.0)
    leading = wiser.observe_claims(claims, TERMS, 1000.0 + TERMS.succession_delay_s)
    assert (leading.role, leading.epoch) == ("leading", 1)


@pytest.mark.parametrize(
    ("epochs", "expected"), [((3, 2), "b"), ((2, 2), "a"), ((2, 3), "a"), ((0, 0), "a")]
)
def test_holder_is_the_highest_epoch_and_then_the_lowest_peer(
    epochs: tuple[int, int], expected: str
) -> None:
    one = LeaseClaim(PeerId("b"), "leading", epochs[0], 100.0)
    other = LeaseClaim(PeerId("a"), "leading", epochs[1], 100.0)
    assert find_leading_claim([one, other], 50.0) == (one if expected == "b" else other)
    assert find_leading_claim([one, other], 100.0) is None


def test_models_are_shared_among_candidates() -> None:
    peers = [PeerId(f"peer{i}") for i in range(5)]
    first = {rank_successors(ModelId(f"model{i}@0"), peers)[0] for i in range(100)}
    assert first == set(peers)
