"""Batch policy: which tokens of which sessions run in the next iteration, decided without I/O."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.server.cost import CostModel
from nesa_node.server.grouping import Grouping
from nesa_node.server.lane import DECODE_TOKENS, LATE, MAX_DECODE_TOKENS, PRIORITIES, Lane

LEAST_GROUP_ROWS = 2
"""Fewest decode tokens that a microbatch has room for."""
GATHER = 1.0
"""Longest wait of a step for the rest of its microbatch at the first hop of a chain, as a fraction
of the gap between two steps of its session, divided by the number of microbatches. Sessions that
ran together once then stay together."""
BURST = 0.25
"""Longest wait at later hops for steps that arrive together, as a fraction of an iteration."""
QUIET = 0.05
"""Once all sessions of the last batch are there, wait only while steps keep arriving within this
fraction of an iteration."""
LEAST_QUIET_S = 0.0003
"""Shorter waits are below the resolution of the event loop's timers."""
DELAY = 0.5
"""How much longer a prefill may make an iteration that also decodes, as a fraction."""
STRETCH = 3.0
"""Most times the usual duration that an iteration with decode steps may take to complete a prefill
at a lower cost per token."""
CHEAPER = 0.5
"""Cost per token, relative to that of the usual chunk, below which a larger one completes the
prefill: a processor may take as long for four tokens as for thirty."""
MOST_CLAIM = 4.0
"""Largest factor on `DELAY` where many sessions wait for their first token and few decode."""
LEAST_CHUNK_TOKENS = 2
"""Fewest prefill tokens in an iteration with decode steps, so that every prefill advances."""
LEAST_ALONE_TOKENS = 8
"""Fewest prefill tokens in an iteration without decode steps: with fewer, most of the time goes
into reading the weights."""
MAX_ITERATION_S = 0.25
"""Longest iteration planned. Bounds how long a new session waits for the device, and how long a
cancelled one keeps its pages."""
MAX_ITERATION_TOKENS = 256
"""Most tokens planned in one iteration, beyond a microbatch of decode steps."""
PATIENCE = 8
"""Iterations between two in which the session that waited longest goes first, whatever its
priority."""
CREDIT_TOKENS = 256
"""Tokens that a client which used less than its share may catch up on."""

L = TypeVar("L", bound=Lane)


class Policy(Generic[L]):
    """Composition of batches: fair between clients rather than sessions, decode steps first.

    An iteration runs the waiting steps of decoding sessions, up to one microbatch, and fills up
    with chunks of everything else: prefills, replays, lower priorities. These get the time that
    decoding sessions can spare, or `MAX_ITERATION_S` when no session decodes.

    Among clients the one with the least service goes first: the virtual token counter of Sheng et
    al., "Fairness in Serving Large Language Models" (2024), which is deficit round robin without a
    quantum. They lift a returning client to the lowest counter; here it keeps a credit of
    `CREDIT_TOKENS`, since a decoding session leaves and returns with every token.
    """

    def __init__(self, *, groups: int | None = None) -> None:
        """`groups` is a fixed number of microbatches; None chooses the faster by measurement."""
        self.cost = CostModel()
        """Cost of one block."""
        self._grouping = Grouping(groups)
        self._away_s: float | None = None
        """Gap of the entering session that decoded last; the default for new ones."""
        self._decodes = 1
        """Decode tokens of the last iteration that had any."""
        self._turn = 0
        self._served: dict[PeerId, float] = {}
        self._level = 0.0
        self._active: set[PeerId] = set()

    def pause_s(self, lanes: Collection[L], now: float) -> float:
        """Seconds to wait for more steps before `plan`, if none arrives meanwhile."""
        waiting = [lane for lane in lanes if lane.waits]
        decoding = [lane for lane in waiting if lane.decoding]
        if not waiting or len(waiting) > len(decoding) > 0:
            return 0.0
        urgent = min(lane.priority for lane in waiting)
        away = [lane for lane in lanes if lane.priority <= urgent and lane.is_away(now)]
        if not away:
            return 0.0
        pause = self._for_a_group if decoding else self._for_decodes
        return max(pause(waiting, away, now) - now, 0.0)

    def plan(self, lanes: Collection[L], now: float) -> list[tuple[L, int]]:
        """The sessions of the next iteration with their token counts; empty if none waits."""
        waiting = [lane for lane in lanes if lane.waits]
        if not waiting:
            return []
        self._admit({lane.client for lane in waiting})
        patient = self._longest_waiting(waiting)
        live = [lane for lane in lanes if lane.lives(now)]
        urgent = min((lane.priority for lane in live), default=len(PRIORITIES))
        live = [lane for lane in live if lane.priority == urgent]
        decoding = [lane for lane in live if lane.waits]
        plan: list[tuple[L, int]] = []
        for lane in self._group(decoding, live, patient):
            self._give(plan, lane, lane.tokens, now)
            lane.decodes(now)
            if lane.leads:
                lane.expect(self._away_s)
                self._away_s = lane.away_s
        rest = [lane for lane in waiting if not (lane.decoding and lane.priority == urgent)]
        if plan:
            self._decodes = _tokens(plan)
        if rest:
            self._grouping.disturb()
        elif entering := sum(lane.leads for lane, _ in plan):
            self._grouping.note(sum(lane.leads for lane in live), entering, now)
        if rest:
            more_urgent = min(lane.priority for lane in rest) < urgent
            first = list(self._in_order(rest, patient))
            span = (plan[0][0] if plan else first[0]).span
            sizes = [lane.tokens for lane in first if lane.span == span and not lane.prefilled]
            room = self._room(plan, rest, () if more_urgent else live, now, sizes)
            for lane in self._in_order(rest, patient):
                if room > 0 and (not plan or lane.span == plan[0][0].span):
                    count = min(lane.tokens, room)
                    lane.prefilled |= count == lane.tokens
                    self._give(plan, lane, count, now)
                    room -= count
        return plan

    def alone(self, lane: L, now: float) -> list[tuple[L, int]]:
        """Plan for a single decoding session, equal to `plan` with one session.

        The client is not charged: without contention its use costs no other client anything.
        """
        lane.served_at = now
        lane.decodes(now)
        return [(lane, lane.tokens)]

    def brief_tokens(self, lane: L, seconds: float) -> int:
        """Most tokens, up to `DECODE_TOKENS`, that a decode step runs in `seconds`."""
        return self.cost.tokens_within(seconds / len(lane.span), DECODE_TOKENS)

    def ran(self, plan: Sequence[tuple[L, int]], seconds: float) -> None:
        """Learn how long an iteration took."""
        self.cost.observe(_tokens(plan), seconds / len(plan[0][0].span))

    def forget(self, client: PeerId) -> None:
        """Remove a client without sessions."""
        self._served.pop(client, None)
        self._active.discard(client)

    def _for_a_group(self, decoding: Sequence[L], away: Sequence[L], now: float) -> float:
        """The time until which to wait for the rest of a microbatch.

        Without waiting, decoding sessions spread over a chain and each step runs alone, although
        the steps of a microbatch together take little longer than one. Microbatches form only where
        sessions enter the chain: if every node waited for one, they would wait in a circle.
        """
        first = min(decoding, key=lambda lane: lane.since)
        if first.leads:
            here = [lane for lane in decoding if lane.leads]
            away = [lane for lane in away if lane.leads]
            groups = self._grouping.groups(len(here) + len(away))
            if _rows(here) >= math.ceil((_rows(here) + _rows(away)) / groups):
                return now
            part = GATHER / groups
            waits = [(lane.since, part * (lane.away_s or self._away_s or 0.0)) for lane in here]
            deadline = min(since + wait_s for since, wait_s in waits)
            lates = [lane.late for lane in away if lane.due <= deadline]
            # A step that waited this long for the expected ones does not leave just before they
            # arrive.
            latest = min(since + LATE * wait_s for since, wait_s in waits)
            return min(latest, max(lates, default=now))
        takes_s = self.cost.seconds(_rows(decoding)) * len(first.span)
        deadline = first.since + BURST * takes_s
        missed = {time for lane in away for time in lane.ran_at}
        if missed.isdisjoint(time for lane in decoding for time in lane.ran_at):
            quiet_s = QUIET * takes_s
            last = max(lane.since for lane in decoding)
            deadline = min(deadline, last + quiet_s) if quiet_s > LEAST_QUIET_S else now
        return min(deadline, max((lane.late for lane in away), default=now))

    def _for_decodes(self, rest: Sequence[L], away: Sequence[L], now: float) -> float:
        """The time until which prefills wait for a decode step, with which they run at little extra
        cost.
        """
        first = min(away, key=lambda lane: lane.soonest)
        gap_s = (first.soonest - now) / len(rest[0].span)
        worth_it = self.cost.seconds(LEAST_ALONE_TOKENS) <= gap_s
        return now if worth_it else first.late

    def _admit(self, clients: set[PeerId]) -> None:
        """Update the active clients. A client saves at most `CREDIT_TOKENS` while it has nothing to
        run.
        """
        for client in clients - self._active:
            before = self._served.get(client, self._level)
            self._served[client] = max(before, self._level - CREDIT_TOKENS)
        self._active = clients
        self._level = max(self._level, min(self._served[client] for client in clients))

    def _give(self, plan: list[tuple[L, int]], lane: L, tokens: int, now: float) -> None:
        plan.append((lane, tokens))
        self._served[lane.client] += tokens
        lane.served_at = now

    def _longest_waiting(self, waiting: Sequence[L]) -> L | None:
        """In every `PATIENCE`-th iteration the session that waited longest; else None."""
        self._turn += 1
        if self._turn % PATIENCE:
            return None
        return min(waiting, key=lambda lane: max(lane.since, lane.served_at))

    def _group(self, decoding: Sequence[L], live: Sequence[L], patient: L | None) -> Iterator[L]:
        """Select one microbatch of decoding sessions through the same blocks, in fair order.

        Its size limits only sessions that enter the chain here; at later hops they arrive as the
        microbatch they are. The batch holds at most `_most_decode_tokens`, but always its first
        step, so that a large step soon comes first and runs.
        """
        entering = [lane for lane in live if lane.leads]
        groups = self._grouping.groups(len(entering))
        room = max(math.ceil(_rows(entering) / groups), LEAST_GROUP_ROWS)
        span = patient.span if patient is not None else None
        most = None
        for lane in self._in_order(decoding, patient):
            span = span or lane.span
            if (room > 0 or not lane.leads) and lane.span == span:
                if most is None:
                    most = self._most_decode_tokens(span)
                elif lane.tokens > most:
                    return
                yield lane
                most -= lane.tokens
                room -= lane.tokens if lane.leads else 0

    def _most_decode_tokens(self, span: Span) -> int:
        """Most tokens of a microbatch: at least `MAX_DECODE_TOKENS`, however long they take.

        Otherwise many sessions with one token each would wait longer where a larger batch is as
        cheap.
        """
        limit_s = MAX_ITERATION_S / len(span)
        return max(self.cost.tokens_within(limit_s, MAX_ITERATION_TOKENS), MAX_DECODE_TOKENS)

    def _room(
        self,
        plan: Sequence[tuple[L, int]],
        rest: Sequence[L],
        live: Sequence[L],
        now: float,
        sizes: Sequence[int],
    ) -> int:
        """Tokens that the iteration may take beside `plan` without delaying the decoding sessions
        `live` too long.

        `sizes`: see `_if_cheaper`.
        """
        taken = _tokens(plan)
        blocks = len((plan[0][0] if plan else rest[0]).span)
        limit_s, least = MAX_ITERATION_S / blocks, LEAST_ALONE_TOKENS
        if not live:
            return max(self.cost.tokens_within(limit_s, MAX_ITERATION_TOKENS) - taken, least)
        if taken:
            usual_s = self.cost.seconds(taken)
            most_s, least = usual_s * (1 + DELAY * _claim(rest, live)), LEAST_CHUNK_TOKENS
        else:
            usual_s = self.cost.seconds(self._decodes)
            gap_s = min(lane.soonest for lane in live) - now
            most_s = max(usual_s * _claim(rest, live), gap_s / blocks)
        room = self.cost.tokens_within(min(most_s, limit_s), MAX_ITERATION_TOKENS) - taken
        most = self.cost.tokens_within(min(STRETCH * usual_s, limit_s), MAX_ITERATION_TOKENS)
        return self._if_cheaper(taken, max(room, least), most - taken, sizes)

    def _if_cheaper(self, taken: int, room: int, most: int, sizes: Sequence[int]) -> int:
        """`room`, or up to `most` tokens beside the `taken` ones if that completes waiting prefills
        at a lower cost per token.

        `sizes` are the waiting tokens of each prefill in fair order, without later chunks of
        prompts that already had their extension.
        """
        before_s = self.cost.seconds(taken) if taken else 0.0

        def per_token(count: int) -> float:
            return (self.cost.seconds(taken + count) - before_s) / count

        done = itertools.takewhile(lambda size: size <= most, itertools.accumulate(sizes))
        more = max(done, default=0)
        return more if more > room and per_token(more) < CHEAPER * per_token(room) else room

    def _in_order(self, lanes: Sequence[L], patient: L | None) -> Iterator[L]:
        if patient is not None and patient in lanes:
            yield patient
        for priority in range(len(PRIORITIES)):
            yield from self._fairly(
                lane for lane in lanes if lane.priority == priority and lane is not patient
            )

    def _fairly(self, lanes: Iterable[L]) -> Iterator[L]:
        """Order by the client's service, least first, then by arrival.

        Tokens assigned between two items count, so the order adapts while it is consumed.
        """
        queues: dict[PeerId, list[L]] = {}
        for lane in sorted(lanes, key=lambda lane: lane.since, reverse=True):
            queues.setdefault(lane.client, []).append(lane)
        while queues:
            client = min(queues, key=self._served.__getitem__)
            yield queues[client].pop()
            if not queues[client]:
                del queues[client]


def _tokens(plan: Sequence[tuple[Lane, int]]) -> int:
    return sum(count for _, count in plan)


def _rows(lanes: Iterable[Lane]) -> int:
    """Decode tokens per round of these sessions."""
    return sum(lane.tokens if lane.waits else lane.decode_tokens for lane in lanes)


def _claim(rest: Sequence[Lane], live: Sequence[Lane]) -> float:
    """Waiting sessions per decoding one, at least 1. Those of a client without a decoding session
    count as one.
    """
    clients = {lane.client for lane in live}
    waiting = sum(lane.client in clients for lane in rest)
    waiting += len({lane.client for lane in rest} - clients)
    return min(max(waiting / len(live), 1.0), MOST_CLAIM)
