"""Which tokens of which sessions run together next. Decides without doing anything."""

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
GATHER = 1.0
"""Where sessions enter a chain, a step waits for the others of a group at most this part of the
time that its session is away between two steps, divided by groups. Once they are together they
stay so."""
BURST = 0.25
"""Elsewhere it waits for those that come with it: this part of what an iteration takes."""
QUIET = 0.05
"""Once all are there with whom they ran lately, only while others keep coming, each so soon
after another."""
LEAST_QUIET_S = 0.0003
"""Less cannot be waited for."""
DELAY = 0.5
"""How much longer than without it a prefill may make an iteration that others decode in."""
STRETCH = 3.0
CHEAPER = 0.5
"""Or so many times as long, once, where a prefill then is done and delays them by this part per
token: a processor may take as long for four tokens as for thirty."""
MOST_CLAIM = 4.0
"""So many times that, where many sessions wait for their first token and few decode."""
LEAST_CHUNK_TOKENS = 2
"""Of a prefill in such an iteration: it must get on."""
LEAST_ALONE_TOKENS = 8
"""Of a prefill in an iteration of its own: with fewer, reading the weights is most of it."""
MAX_ITERATION_S = 0.25
"""Bounds how long a newcomer, or the room of a cancelled session, waits for the device."""
MAX_ITERATION_TOKENS = 256
PATIENCE = 8
"""Every so many iterations whoever waited longest goes before whoever is more urgent."""
CREDIT_TOKENS = 256
"""What a client that used less than its share may catch up on."""

L = TypeVar("L", bound=Lane)


class Policy(Generic[L]):
    """Fair between clients, not between their sessions, and kind to those who decode.

    An iteration runs the waiting steps of sessions that decode, as many as make a group, and fills
    up with pieces of everything else: prefills, replays, less urgent work. These get what time the
    decoding sessions can spare, or `MAX_ITERATION_S` where nobody decodes.

    Among clients the one that was served least goes first: the virtual token counter of Sheng et
    al., "Fairness in Serving Large Language Models" (2024), which is deficit round robin without a
    quantum. Where they lift whoever returns to the lowest counter, we leave it `CREDIT_TOKENS`, as
    a session that decodes leaves and returns with every token.
    """

    def __init__(self, *, groups: int | None = None) -> None:
        """`groups` of sessions that decode; None: as many as give most tokens."""
        self.cost = CostModel()
        """Of one block."""
        self._grouping = Grouping(groups)
        self._away_s: float | None = None
        """For how long the session was away that decoded last, of those that enter a chain here."""
        self._decodes = 1
        """Tokens of the last iteration that had any of those."""
        self._turn = 0
        self._served: dict[PeerId, float] = {}
        self._level = 0.0
        self._active: set[PeerId] = set()

    def pause_s(self, lanes: Collection[L], now: float) -> float:
        """How long to wait for more before `plan`, if nothing comes meanwhile."""
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
        """The sessions of the next iteration and how many tokens of each; empty if none waits."""
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
        """What `plan` comes to where there is one session, and that decodes.

        It is not charged for it: what a client uses while nobody else is there costs nobody.
        """
        lane.served_at = now
        lane.decodes(now)
        return [(lane, lane.tokens)]

    def brief_tokens(self, lane: L, seconds: float) -> int:
        """Of how many tokens a step of a decode takes no longer than that."""
        return self.cost.tokens_within(seconds / len(lane.span), DECODE_TOKENS)

    def ran(self, plan: Sequence[tuple[L, int]], seconds: float) -> None:
        """Learn how long an iteration took."""
        self.cost.observe(_tokens(plan), seconds / len(plan[0][0].span))

    def forget(self, client: PeerId) -> None:
        """The client has no session any more."""
        self._served.pop(client, None)
        self._active.discard(client)

    def _for_a_group(self, decoding: Sequence[L], away: Sequence[L], now: float) -> float:
        """Until when to wait for the rest of a group.

        Left to themselves sessions that decode spread over a chain, each step alone at some node,
        where the steps of a group together take little longer than one. Only where sessions enter
        the chain groups are made: if every node waited for one, they would wait in a circle.
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
            # Who waited so long for them does not leave a moment before they come.
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
        """Until when to wait for a step of a decode, with which prefills run for little more."""
        first = min(away, key=lambda lane: lane.soonest)
        gap_s = (first.soonest - now) / len(rest[0].span)
        worth_it = self.cost.seconds(LEAST_ALONE_TOKENS) <= gap_s
        return now if worth_it else first.late

    def _admit(self, clients: set[PeerId]) -> None:
        """Nobody saves up what it did not use while it had nothing to run."""
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
        """In every `PATIENCE`-th iteration: whose turn it is, however little urgent."""
        self._turn += 1
        if self._turn % PATIENCE:
            return None
        return min(waiting, key=lambda lane: max(lane.since, lane.served_at))

    def _group(self, decoding: Sequence[L], live: Sequence[L], patient: L | None) -> Iterator[L]:
        """Those of one group, fairly chosen and through the same blocks.

        Of those that enter the chain here; all others that are there come as the group they are. At
        `most` tokens run, and the first step: that which does not fit is soon the first.
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
        """Of a group. Up to `MAX_DECODE_TOKENS` run together however long they take.

        Else many sessions with a token each would each wait longer, where that is as cheap.
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
        """How many tokens more the iteration may have, for the sake of those who `live`.

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
        """`room` tokens beside those `taken`, or more, up to `most`, with which the first are done.

        `sizes`: of those who wait, in the order in which they are given tokens, but for chunks of
        prompts that have had theirs.
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
        """The least served client's first, and of a client's the one that came first.

        What is given to them between two of these counts.
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
    """Of sessions that decode, tokens in each round."""
    return sum(lane.tokens if lane.waits else lane.decode_tokens for lane in lanes)


def _claim(rest: Sequence[Lane], live: Sequence[Lane]) -> float:
    """How many sessions wait for each that decodes, those of a client that has none as one."""
    clients = {lane.client for lane in live}
    waiting = sum(lane.client in clients for lane in rest)
    waiting += len({lane.client for lane in rest} - clients)
    return min(max(waiting / len(live), 1.0), MOST_CLAIM)
