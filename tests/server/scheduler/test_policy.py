"""Who runs next: fairness, priorities, groups and how much a prefill may delay others."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from nesa_node.core.ids import PeerId, Span
from nesa_node.server.scheduler.policy import (
    ARRIVAL_WAIT_FRACTION,
    IDLE_GAP_FRACTION,
    MAX_ITERATION_S,
    MAX_ITERATION_TOKENS,
    MAX_PREFILL_SLOWDOWN,
    MIN_CHUNK_TOKENS,
    MIN_PREFILL_TOKENS,
    PREFILL_SLOWDOWN,
    STARVATION_INTERVAL,
    BatchPolicy,
)
from nesa_node.server.scheduler.session_queue import (
    DECODE_ACTIVE_S,
    MAX_DECODE_STEP_TOKENS,
    PRIORITIES,
    ScheduledSession,
    is_decode_step,
)

SPAN = Span(0, 4)


class Bench:
    """Sessions on a simulated device: an iteration takes `fixed_s` and `token_s` a token."""

    def __init__(
        self, *, fixed_s: float = 0.02, token_s: float = 0.002, groups: int | None = None
    ) -> None:
        self.policy: BatchPolicy[ScheduledSession] = BatchPolicy(microbatches=groups)
        self.lanes: list[ScheduledSession] = []
        self.now = 100.0
        self.served: Counter[PeerId] = Counter()
        self.fixed_s, self.token_s = fixed_s, token_s

    def lane(
        self, client: str = "a", priority: str = "interactive", span: Span = SPAN
    ) -> ScheduledSession:
        of = PeerId(client)
        lane = ScheduledSession(
            client=of, priority=PRIORITIES.index(priority), span=span, is_entry_hop=True
        )
        self.lanes.append(lane)
        return lane

    def decoders(
        self, count: int, client: str = "a", priority: str = "interactive"
    ) -> list[ScheduledSession]:
        made = [self.lane(client, priority) for _ in range(count)]
        for lane in made:
            self.wants(lane, 1)
        return made

    def wants(self, lane: ScheduledSession, tokens: int, *, rows: int = 1) -> None:
        lane.queued_tokens += tokens
        lane.has_decode_step = lane.queued_tokens == tokens and is_decode_step(
            [tokens // rows] * rows
        )
        lane.waiting_since = self.now

    def iterate(self) -> list[tuple[ScheduledSession, int]]:
        plan = self.policy.plan(self.lanes, self.now)
        assert len({id(lane) for lane, _ in plan}) == len(plan)
        assert len({lane.span for lane, _ in plan}) <= 1
        for lane, tokens in plan:
            assert 0 < tokens <= lane.queued_tokens
            lane.queued_tokens -= tokens
            lane.has_decode_step = False
            self.served[lane.client] += tokens
        if plan:
            self.policy.record_iteration(plan, self.takes(plan))
            self.now += self.takes(plan)
        return plan

    def takes(self, plan: Sequence[tuple[ScheduledSession, int]]) -> float:
        return self.fixed_s + self.token_s * sum(tokens for _, tokens in plan)

    def warm_up(self) -> None:
        """Let the policy learn the device, and forget who was there."""
        lane = self.lane("warm-up")
        for _ in range(60):
            self.wants(lane, 1)
            self.iterate()
            self.wants(lane, 3000)
            while lane.queued_tokens:
                self.iterate()
        self.lanes.remove(lane)
        self.now += DECODE_ACTIVE_S


def test_nothing_runs_when_nothing_waits_or_all_are_held() -> None:
    bench = Bench()
    assert bench.iterate() == []
    bench.wants(held := bench.lane(), 5)
    held.paused = True
    assert bench.iterate() == []


def test_waiting_decodes_and_a_piece_of_a_prefill_run_together() -> None:
    bench = Bench()
    bench.warm_up()
    decoders = bench.decoders(2)
    bench.wants(prefill := bench.lane(), 2000)
    plan = dict(bench.iterate())
    assert [plan[lane] for lane in decoders] == [1, 1]
    assert 0 < plan[prefill] < 2000


def test_many_who_decode_travel_in_groups() -> None:
    bench = Bench()
    decoders = bench.decoders(16)
    first, second = bench.iterate(), bench.iterate()
    assert len(first) == len(second) == 8
    assert {id(lane) for lane, _ in [*first, *second]} == {id(lane) for lane in decoders}
    for lane, _ in first:
        bench.wants(lane, 1)
    assert len(bench.iterate()) == 8


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([8], True), ([9], False), ([1] * 64, True), ([8] * 8, True), ([1] * 65, False)],
)
def test_a_step_of_a_decode_has_few_tokens_for_each_row_and_in_all(
    counts: list[int], expected: bool
) -> None:
    assert is_decode_step(counts) == expected


def test_short_steps_of_many_rows_hold_up_a_decode_no_more_than_prefills_do() -> None:
    bench = Bench()
    bench.warm_up()
    (honest,) = bench.decoders(1, "honest")
    for _ in range(4):
        bench.wants(bench.lane("wide"), 2048, rows=256)
    undisturbed = bench.takes([(honest, 1)])
    for _ in range(40):
        plan = bench.iterate()
        assert honest in dict(plan)
        assert sum(tokens for _, tokens in plan) <= MAX_ITERATION_TOKENS
        assert bench.takes(plan) <= 2 * undisturbed
        bench.wants(honest, 1)


@pytest.mark.parametrize(("token_s", "most"), [(1e-6, MAX_ITERATION_TOKENS), (0.002, 128)])
def test_a_group_ends_before_its_iteration_is_long_and_all_have_their_turn(
    token_s: float, most: int
) -> None:
    bench = Bench(groups=1, token_s=token_s)
    for _ in range(60):
        for tokens in (1, 64, most):
            bench.policy.cost.observe(tokens, (bench.fixed_s + token_s * tokens) / len(SPAN))
    wide = [bench.lane("wide") for _ in range(8)]
    (honest,) = bench.decoders(1, "honest")
    turns: Counter[int] = Counter()
    for _ in range(40):
        for lane in wide:
            if not lane.queued_tokens:
                bench.wants(lane, MAX_DECODE_STEP_TOKENS, rows=8)
        if not honest.queued_tokens:
            bench.wants(honest, 1)
        plan = bench.iterate()
        assert sum(tokens for _, tokens in plan) <= most
        turns.update(id(lane) for lane, _ in plan)
    assert turns[id(honest)] >= 35
    assert min(turns[id(lane)] for lane in wide) >= 40 // 8 - 1


def test_64_sessions_with_a_token_each_run_together_on_a_slow_device() -> None:
    bench = Bench(groups=1, token_s=0.05)
    bench.decoders(64)
    assert len(bench.iterate()) == 64


@pytest.mark.parametrize("groups", [1, 3])
def test_the_number_of_groups_can_be_chosen(groups: int) -> None:
    bench = Bench(groups=groups)
    bench.decoders(12)
    assert len(bench.iterate()) == 12 // groups


def test_a_prefill_makes_an_iteration_with_decodes_at_most_so_much_longer() -> None:
    bench = Bench()
    bench.warm_up()
    decoders, prefill = bench.decoders(2), bench.lane("b")
    bench.wants(prefill, 20_000)
    longest, chunks = 0.0, []
    undisturbed = bench.takes([(lane, 1) for lane in decoders])
    for _ in range(40):
        plan = bench.iterate()
        longest = max(longest, bench.takes(plan))
        chunks.append(dict(plan)[prefill])
        for lane in decoders:
            bench.wants(lane, 1)
    least = bench.fixed_s + bench.token_s * (MIN_CHUNK_TOKENS + 2)
    assert longest <= max(undisturbed * (1 + PREFILL_SLOWDOWN), least) * 1.01
    assert chunks[-1] >= MIN_CHUNK_TOKENS


class Stepped(Bench):
    """As a processor in float32: five tokens take as long as thirty."""

    def takes(self, plan: Sequence[tuple[ScheduledSession, int]]) -> float:
        return self.takes_for(sum(count for _, count in plan))

    def takes_for(self, tokens: int) -> float:
        return min(0.011 * max(tokens, 2), 0.055) + 0.001 * max(tokens - 32, 0)

    def warm_up(self) -> None:
        for tokens in (1, 2, 4, 8, 32, 128):
            self.policy.cost.observe(tokens, self.takes_for(tokens) / len(SPAN))


@pytest.mark.parametrize("waiting", [1, 2])
def test_a_short_prompt_is_done_at_once_where_that_costs_less_than_pieces(waiting: int) -> None:
    bench = Stepped()
    bench.warm_up()
    (decoder,) = bench.decoders(1)
    for _ in range(waiting):
        bench.wants(bench.lane(), 24 // waiting)
    plan = bench.iterate()
    assert len(plan) == 1 + waiting
    assert not any(lane.queued_tokens for lane in bench.lanes)
    assert bench.takes(plan) <= MAX_PREFILL_SLOWDOWN * 0.022
    assert not decoder.queued_tokens


@pytest.mark.parametrize("other", [{"priority": "batch"}, {"span": Span(0, 2)}])
def test_nobody_is_delayed_for_a_short_prompt_whose_turn_it_is_not(other: dict[str, Any]) -> None:
    bench = Stepped()
    bench.warm_up()
    bench.decoders(1)
    bench.wants(bench.lane(), 3000)
    bench.wants(short := bench.lane(**other), 24)
    plan = bench.iterate()
    assert short.queued_tokens == 24
    assert bench.takes(plan) <= 0.022 * (1 + 2 * PREFILL_SLOWDOWN)


def test_a_long_prompt_is_not_done_in_pieces_that_are_cheap_but_long() -> None:
    bench = Stepped()
    bench.warm_up()
    (decoder,) = bench.decoders(1)
    bench.wants(bench.lane(), 3000)
    taken_s = []
    for _ in range(20):
        taken_s.append(bench.takes(bench.iterate()))
        bench.wants(decoder, 1)
    assert max(taken_s[10:]) <= 0.022 * (1 + PREFILL_SLOWDOWN)


def test_a_long_prompt_in_short_chunks_is_favoured_once() -> None:
    bench = Stepped()
    bench.warm_up()
    (decoder,) = bench.decoders(1)
    bench.wants(prompt := bench.lane(), 24)
    assert prompt.queued_tokens == 24
    bench.iterate()
    assert not prompt.queued_tokens
    for _ in range(20):
        bench.wants(decoder, 1)
        bench.wants(prompt, 24 - prompt.queued_tokens)
        assert bench.takes(bench.iterate()) <= 0.022 * (1 + PREFILL_SLOWDOWN)


def test_the_more_sessions_wait_for_a_first_token_the_more_they_get() -> None:
    """Those of others count as one for each client: floods get no more than a prompt."""
    given = {}
    for kind in ("one", "flood of others", "own"):
        bench = Bench()
        bench.warm_up()
        bench.decoders(2, "a")
        client = "a" if kind == "own" else "b"
        for _ in range(1 if kind == "one" else 8):
            bench.wants(bench.lane(client), 1000)
        given[kind] = sum(tokens for _, tokens in bench.iterate()) - 2
    assert given["flood of others"] == given["one"]
    assert given["own"] > 3 * given["one"]


def test_a_prefill_between_decodes_stays_short_while_they_are_expected() -> None:
    bench = Bench()
    bench.warm_up()
    (decoder,) = bench.decoders(1)
    bench.iterate()
    bench.wants(prefill := bench.lane("b"), 20_000)
    bench.now += DECODE_ACTIVE_S / 2
    (short,) = bench.iterate()
    assert short[1] <= MIN_PREFILL_TOKENS
    bench.now += DECODE_ACTIVE_S
    (long,) = bench.iterate()
    assert long[0] is prefill
    assert long[1] > 80
    assert bench.takes([long]) <= MAX_ITERATION_S
    assert not decoder.queued_tokens


def test_an_iteration_is_short_before_anything_is_known_and_bounded_at_last() -> None:
    bench = Bench(fixed_s=1e-4, token_s=1e-7)
    bench.wants(prefill := bench.lane(), 100_000)
    assert bench.iterate()[0][1] < 100
    for _ in range(40):
        (last,) = bench.iterate()
    assert last == (prefill, MAX_ITERATION_TOKENS)


def test_clients_share_prefill_alike_however_many_sessions_they_have() -> None:
    bench = Bench()
    bench.warm_up()
    for client, sessions in {"a": 1, "b": 10, "c": 30}.items():
        for _ in range(sessions):
            bench.wants(bench.lane(client), 40_000)
    bench.served.clear()
    for _ in range(300):
        bench.iterate()
    shares = [bench.served[PeerId(client)] for client in "abc"]
    assert max(shares) < 1.1 * min(shares)


def test_one_session_is_in_every_group_beside_a_client_with_fifty() -> None:
    bench = Bench()
    many = bench.decoders(50, "many")
    (single,) = bench.decoders(1, "one")
    rounds = 30
    turns = 0
    for _ in range(rounds):
        plan = bench.iterate()
        turns += single in dict(plan)
        for lane in [*many, single]:
            if not lane.queued_tokens:
                bench.wants(lane, 1)
    assert turns == rounds


def test_who_was_idle_has_not_saved_up_more_than_a_credit() -> None:
    bench = Bench()
    bench.warm_up()
    bench.wants(bench.lane("busy"), 1_000_000)
    bench.wants(bench.lane("other"), 1_000_000)
    late = bench.lane("late")
    bench.wants(late, 1)
    for _ in range(200):
        bench.iterate()
    before = bench.served.copy()
    bench.wants(late, 1_000_000)
    for _ in range(200):
        bench.iterate()
    gained = {client: bench.served[client] - before[client] for client in bench.served}
    assert gained[PeerId("late")] < 1.15 * gained[PeerId("busy")]


def test_more_urgent_work_goes_first_and_the_rest_is_not_starved() -> None:
    bench = Bench()
    bench.warm_up()
    by_priority = {name: bench.lane(name, name) for name in PRIORITIES}
    for lane in by_priority.values():
        bench.wants(lane, 1_000_000)
    bench.served.clear()
    rounds = 40 * STARVATION_INTERVAL
    for _ in range(rounds):
        bench.iterate()
    shares = [bench.served[lane.client] / bench.served.total() for lane in by_priority.values()]
    assert shares[0] > 0.8
    assert min(shares[1:]) > 0.3 / STARVATION_INTERVAL


def test_less_urgent_decodes_do_not_hold_up_urgent_ones() -> None:
    bench = Bench()
    bench.warm_up()
    decoders = bench.decoders(2)
    training = [bench.lane("t", "training") for _ in range(4)]
    for lane in training:
        bench.wants(lane, 500)
    undisturbed = bench.takes([(lane, 1) for lane in decoders])
    for _ in range(20):
        plan = bench.iterate()
        assert {id(lane) for lane in decoders} <= {id(lane) for lane, _ in plan}
        assert bench.takes(plan) < 2 * undisturbed
        for lane in decoders:
            bench.wants(lane, 1)


def test_an_urgent_prefill_does_not_wait_for_less_urgent_decodes() -> None:
    bench = Bench()
    bench.warm_up()
    batch = bench.decoders(4, "b", "batch")
    bench.iterate()
    bench.wants(prefill := bench.lane("a"), 5000)
    assert dict(bench.iterate())[prefill] > 50
    assert len(batch) == 4


def test_sessions_through_other_blocks_take_turns() -> None:
    bench = Bench()
    whole, part = bench.lane("a"), bench.lane("a", span=Span(1, 3))
    for _ in range(10):
        for lane in (whole, part):
            if not lane.queued_tokens:
                bench.wants(lane, 1)
        bench.iterate()
    assert abs(whole.scheduled_at - part.scheduled_at) < 0.1
    assert bench.served[PeerId("a")] == 10


def test_those_who_only_pass_are_no_part_of_groups() -> None:
    bench = Bench()
    passing = bench.decoders(6)
    for lane in passing:
        lane.is_entry_hop = False
    entering = bench.decoders(8)
    plan = [lane for lane, _ in bench.iterate()]
    assert sum(lane in entering for lane in plan) == 4
    assert sum(lane in passing for lane in plan) == 6


def test_one_who_is_away_for_long_does_not_make_the_others_wait() -> None:
    bench = Bench(groups=1)
    lanes = bench.decoders(8)
    for lane, away_s in zip(lanes, [0.8, 0.8] + [0.05] * 6, strict=True):
        lane.decode_gap_s = lane.min_decode_gap_s = away_s
        lane.last_decode_tokens = 1
    late = lanes[1]
    late.queued_tokens, late.has_decode_step, late.decoded_at = 0, False, bench.now - 0.3
    assert bench.policy.batching_delay_s(bench.lanes, bench.now) <= 0.05


def test_who_waited_for_the_others_does_not_leave_a_moment_before_they_come() -> None:
    bench = Bench(groups=1)
    lanes = bench.decoders(4)
    for lane in lanes:
        lane.decode_gap_s = lane.min_decode_gap_s = 0.05
        lane.last_decode_tokens = 1
    behind, *others = lanes
    for lane in others:
        lane.queued_tokens, lane.has_decode_step, lane.decoded_at = 0, False, bench.now
    # It came just after they had left.
    behind.waiting_since = bench.now + 0.001
    assert bench.policy.batching_delay_s(bench.lanes, bench.now + 0.0515) > 0
    assert bench.policy.batching_delay_s(bench.lanes, bench.now + 0.07) == 0


def test_at_inner_nodes_steps_wait_for_those_they_ran_with() -> None:
    bench = Bench()
    bench.warm_up()
    bench.lanes.clear()
    lanes = bench.decoders(6)
    for lane in lanes:
        lane.is_entry_hop = False
    bench.iterate()
    bench.now += 0.05
    for lane in lanes:
        lane.decode_gap_s = lane.min_decode_gap_s = 0.085
    for lane in lanes[:4]:
        bench.wants(lane, 1)
    long_s = bench.policy.batching_delay_s(bench.lanes, bench.now)
    for lane in lanes[4:]:
        bench.wants(lane, 1)
    short_s = bench.policy.batching_delay_s(bench.lanes, bench.now)
    takes_s = bench.takes([(lane, 1) for lane in lanes])
    assert 0 <= short_s < 0.1 * takes_s < long_s < 0.3 * takes_s


def test_one_time_apart_does_not_make_strangers_of_sessions() -> None:
    first, second = (ScheduledSession(client=PeerId("a"), priority=0, span=SPAN) for _ in range(2))

    def have_met() -> bool:
        return not set(first.recent_decode_times).isdisjoint(second.recent_decode_times)

    assert not have_met()
    first.record_decode(1.0)
    second.record_decode(1.0)
    assert have_met()
    first.record_decode(2.0)
    second.record_decode(2.1)
    assert have_met()
    first.record_decode(3.0)
    second.record_decode(3.1)
    assert not have_met()


@pytest.mark.parametrize("seed", range(40))
def test_a_pause_at_inner_nodes_is_long_exactly_where_two_have_met(seed: int) -> None:
    """Compared with looking at each pair."""
    rng = random.Random(seed)
    bench = Bench()
    bench.warm_up()
    bench.now = 200.0
    times = [-math.inf, *(bench.now - rng.uniform(0.01, 0.05) for _ in range(8))]
    here, away = (bench.decoders(rng.randint(1, 4)) for _ in range(2))
    for lane in bench.lanes:
        lane.is_entry_hop, lane.decode_gap_s = False, 1.0
        lane.decoded_at, lane.previous_decoded_at = rng.sample(times, 2)
    for lane in away:
        lane.queued_tokens, lane.decoded_at = 0, rng.choice(times[1:])
    pairs = [
        {a.decoded_at, a.previous_decoded_at} & {b.decoded_at, b.previous_decoded_at} - {-math.inf}
        for a in here
        for b in away
    ]
    usual_s = ARRIVAL_WAIT_FRACTION * bench.takes([(lane, 1) for lane in here])
    quiet_s = IDLE_GAP_FRACTION / ARRIVAL_WAIT_FRACTION * usual_s
    pause_s = bench.policy.batching_delay_s(bench.lanes, bench.now)
    assert pause_s == pytest.approx(usual_s if any(pairs) else quiet_s, rel=0.2)


def test_a_pause_looks_at_each_session_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.warm_up()
    looks = 0
    ran_at = vars(ScheduledSession)["recent_decode_times"].fget

    def counted(lane: ScheduledSession) -> tuple[float, ...]:
        nonlocal looks
        looks += 1
        times: tuple[float, ...] = ran_at(lane)
        return times

    monkeypatch.setattr(ScheduledSession, "recent_decode_times", property(counted))
    for number, lane in enumerate(bench.decoders(1000)):
        lane.is_entry_hop, lane.decode_gap_s = False, 1.0
        lane.decoded_at = bench.now - (0.02 if number % 2 else 0.03)
        lane.queued_tokens *= number % 2
    assert bench.policy.batching_delay_s(bench.lanes, bench.now) > 0
    assert 0 < looks <= 1000


def test_the_first_step_of_a_newcomer_waits_as_the_others_do() -> None:
    bench = Bench(groups=1)
    old = bench.decoders(3)
    for _ in range(3):
        bench.iterate()
        bench.now += 0.05
        for lane in old:
            bench.wants(lane, 1)
    bench.iterate()
    bench.now += 0.045
    newcomer = bench.lane()
    bench.wants(newcomer, 1)
    assert 0 < bench.policy.batching_delay_s(bench.lanes, bench.now) < 0.05
    for lane in old:
        bench.wants(lane, 1)
    assert len(bench.iterate()) == 4
    # And from then on it is waited for.
    bench.now += 0.045
    for lane in old:
        bench.wants(lane, 1)
    assert bench.policy.batching_delay_s(bench.lanes, bench.now) > 0


def test_who_is_away_for_long_and_due_delays_nobody_for_longer_than_a_round() -> None:
    bench = Bench(groups=1)
    lanes = bench.decoders(4)
    for lane in lanes:
        lane.decode_gap_s = lane.min_decode_gap_s = 0.05
        lane.last_decode_tokens = 1
    slow = lanes[0]
    slow.decode_gap_s = slow.min_decode_gap_s = 0.8
    slow.queued_tokens, slow.has_decode_step, slow.decoded_at = 0, False, bench.now - 0.79
    assert 0.01 < bench.policy.batching_delay_s(bench.lanes, bench.now) <= 0.0626
