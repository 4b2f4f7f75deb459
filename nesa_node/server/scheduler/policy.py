"""Batch policy: which tokens of which sessions run in the next iteration, decided without I/O, by
a cost model that is learned from the iterations that ran.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from nesa_node.core.ids import PeerId, Span
from nesa_node.server.scheduler.batch import MicrobatchTuner
from nesa_node.server.scheduler.session_queue import (
    MAX_DECODE_ROW_TOKENS,
    MAX_DECODE_STEP_TOKENS,
    OVERDUE_FACTOR,
    PRIORITIES,
    ScheduledSession,
)

COST_LEARNING_RATE = 0.25
MAX_SURPRISE_FACTOR = 2.0
"""Most times its prediction that a measured time counts: an outlier teaches little."""
INITIAL_S_PER_TOKEN = 0.02
"""Prediction before anything ran: slow, so that the first iterations are short."""


class CostModel:
    """Seconds by token count: one exponential average per power of two, linear in between.

    Stale averages are corrected by two facts about a batch: fewer tokens take no longer, and more
    tokens take no longer per token.
    """

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn that `tokens` >= 1 took `seconds`."""
        size = tokens.bit_length()
        if self._points:
            seconds = min(seconds, MAX_SURPRISE_FACTOR * self.predict_s(tokens))
        mean_tokens, mean_s = self._points.get(size, (float(tokens), seconds))
        self._points[size] = (
            mean_tokens + COST_LEARNING_RATE * (tokens - mean_tokens),
            mean_s + COST_LEARNING_RATE * (seconds - mean_s),
        )

    def predict_s(self, tokens: float) -> float:
        """Predicted seconds; never fewer for more tokens."""
        if not self._points:
            return tokens * INITIAL_S_PER_TOKEN
        points = self._points.values()
        most = min(seconds * max(tokens / known, 1.0) for known, seconds in points)
        below = max((point for point in points if point[0] <= tokens), default=None)
        above = min((point for point in points if point[0] > tokens), default=None)
        if below is None or above is None or above[1] <= below[1]:
            return most
        slope = (above[1] - below[1]) / (above[0] - below[0])
        return min(below[1] + slope * (tokens - below[0]), most)

    def max_tokens_within(self, seconds: float, limit: int) -> int:
        """The largest number of tokens, up to `limit`, predicted to take at most `seconds`."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.predict_s(middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low


MIN_MICROBATCH_TOKENS = 2
"""Fewest decode tokens that a microbatch has room for."""
ENTRY_WAIT_FRACTION = 1.0
"""Longest wait of a step for the rest of its microbatch at the first hop of a chain, as a fraction
of the gap between two steps of its session, divided by the number of microbatches. Sessions that
ran together once then stay together."""
ARRIVAL_WAIT_FRACTION = 0.25
"""Longest wait at later hops for steps that arrive together, as a fraction of an iteration."""
IDLE_GAP_FRACTION = 0.05
"""Once all sessions of the last batch are there, wait only while steps keep arriving within this
fraction of an iteration."""
MIN_IDLE_GAP_S = 0.0003
"""Shorter waits are below the resolution of the event loop's timers."""
PREFILL_SLOWDOWN = 0.5
"""How much longer a prefill may make an iteration that also decodes, as a fraction."""
MAX_PREFILL_SLOWDOWN = 3.0
"""Most times the usual duration that an iteration with decode steps may take to complete a prefill
at a lower cost per token."""
MAX_EXTENDED_COST_RATIO = 0.5
"""Cost per token, relative to that of the usual chunk, below which a larger one completes the
prefill: a processor may take as long for four tokens as for thirty."""
MAX_PREFILL_PRESSURE = 4.0
"""Largest factor on `PREFILL_SLOWDOWN` where many sessions wait for their first token and few
decode."""
MIN_CHUNK_TOKENS = 2
"""Fewest prefill tokens in an iteration with decode steps, so that every prefill advances."""
MIN_PREFILL_TOKENS = 8
"""Fewest prefill tokens in an iteration without decode steps: with fewer, most of the time goes
into reading the weights."""
MAX_ITERATION_S = 0.25
"""Longest iteration planned. Bounds how long a new session waits for the device, and how long a
cancelled one keeps its pages."""
MAX_ITERATION_TOKENS = 256
"""Most tokens planned in one iteration, beyond a microbatch of decode steps."""
STARVATION_INTERVAL = 8
"""Iterations between two in which the session that waited longest goes first, whatever its
priority."""
MAX_CREDIT_TOKENS = 256
"""Tokens that a client which used less than its share may catch up on."""

L = TypeVar("L", bound=ScheduledSession)


class BatchPolicy(Generic[L]):
    """Composition of batches: fair between clients rather than sessions, decode steps first.

    An iteration runs the waiting steps of decoding sessions, up to one microbatch, and fills up
    with chunks of everything else: prefills, replays, lower priorities. These get the time that
    decoding sessions can spare, or `MAX_ITERATION_S` when no session decodes.

    Among clients the one with the least service goes first: the virtual token counter of Sheng et
    al., "Fairness in Serving Large Language Models" (2024), which is deficit round robin without a
    quantum. They lift a returning client to the lowest counter; here it keeps a credit of
    `MAX_CREDIT_TOKENS`, since a decoding session leaves and returns with every token.
    """

    def __init__(self, *, microbatches: int | None = None) -> None:
        """`microbatches` is a fixed number; None chooses the faster number by measurement."""
        self.cost = CostModel()
        """Cost of one block."""
        self._microbatches = MicrobatchTuner(microbatches)
        self._default_gap_s: float | None = None
        """Gap of the entering session that decoded last; the default for new ones."""
        self._last_decode_tokens = 1
        """Decode tokens of the last iteration that had any."""
        self._iteration = 0
        self._served_tokens: dict[PeerId, float] = {}
        self._served_floor = 0.0
        self._active_clients: set[PeerId] = set()

    def batching_delay_s(self, sessions: Collection[L], now: float) -> float:
        """Seconds to wait for more steps before `plan`, if none arrives meanwhile."""
        waiting = [session for session in sessions if session.is_runnable]
        decoding = [session for session in waiting if session.has_decode_step]
        if not waiting or len(waiting) > len(decoding) > 0:
            return 0.0
        urgent = min(session.priority for session in waiting)
        away = [
            session
            for session in sessions
            if session.priority <= urgent and session.is_decode_expected(now)
        ]
        if not away:
            return 0.0
        pause = self._wait_for_microbatch if decoding else self._wait_for_decodes
        return max(pause(waiting, away, now) - now, 0.0)

    def plan(self, sessions: Collection[L], now: float) -> list[tuple[L, int]]:
        """The sessions of the next iteration with their token counts; empty if none waits."""
        waiting = [session for session in sessions if session.is_runnable]
        if not waiting:
            return []
        self._update_active_clients({session.client for session in waiting})
        starved = self._starved_session(waiting)
        active = [session for session in sessions if session.is_decoding(now)]
        urgent = min((session.priority for session in active), default=len(PRIORITIES))
        active = [session for session in active if session.priority == urgent]
        decoding = [session for session in active if session.is_runnable]
        plan: list[tuple[L, int]] = []
        for session in self._select_microbatch(decoding, active, starved):
            self._assign_tokens(plan, session, session.queued_tokens, now)
            session.record_decode(now)
            if session.is_entry_hop:
                session.set_default_gap(self._default_gap_s)
                self._default_gap_s = session.decode_gap_s
        prefills = [
            session
            for session in waiting
            if not (session.has_decode_step and session.priority == urgent)
        ]
        if plan:
            self._last_decode_tokens = _planned_tokens(plan)
        if prefills:
            self._microbatches.discard_sample()
        elif entering := sum(session.is_entry_hop for session, _ in plan):
            self._microbatches.record_steps(
                sum(session.is_entry_hop for session in active), entering, now
            )
        if prefills:
            more_urgent = min(session.priority for session in prefills) < urgent
            first = list(self._by_priority(prefills, starved))
            span = (plan[0][0] if plan else first[0]).span
            sizes = [
                session.queued_tokens
                for session in first
                if session.span == span and not session.prefill_started
            ]
            room = self._prefill_budget(plan, prefills, () if more_urgent else active, now, sizes)
            for session in self._by_priority(prefills, starved):
                if room > 0 and (not plan or session.span == plan[0][0].span):
                    count = min(session.queued_tokens, room)
                    session.prefill_started |= count == session.queued_tokens
                    self._assign_tokens(plan, session, count, now)
                    room -= count
        return plan

    def plan_single(self, session: L, now: float) -> list[tuple[L, int]]:
        """Plan for a single decoding session, equal to `plan` with one session.

        The client is not charged: without contention its use costs no other client anything.
        """
        session.scheduled_at = now
        session.record_decode(now)
        return [(session, session.queued_tokens)]

    def inline_tokens(self, session: L, seconds: float) -> int:
        """Most tokens, up to `MAX_DECODE_ROW_TOKENS`, that a decode step runs in `seconds`."""
        return self.cost.max_tokens_within(seconds / session.num_blocks, MAX_DECODE_ROW_TOKENS)

    def record_iteration(self, plan: Sequence[tuple[L, int]], seconds: float) -> None:
        """Learn how long an iteration took."""
        self.cost.observe(_planned_tokens(plan), seconds / plan[0][0].num_blocks)

    def forget_client(self, client: PeerId) -> None:
        """Remove a client without sessions."""
        self._served_tokens.pop(client, None)
        self._active_clients.discard(client)

    def _wait_for_microbatch(
        self, decoding: Sequence[L], expected: Sequence[L], now: float
    ) -> float:
        """The time until which to wait for the rest of a microbatch.

        Without waiting, decoding sessions spread over a chain and each step runs alone, although
        the steps of a microbatch together take little longer than one. Microbatches form only where
        sessions enter the chain: if every node waited for one, they would wait in a circle.
        """
        first = min(decoding, key=lambda session: session.waiting_since)
        if first.is_entry_hop:
            here = [session for session in decoding if session.is_entry_hop]
            expected = [session for session in expected if session.is_entry_hop]
            microbatches = self._microbatches.num_microbatches(len(here) + len(expected))
            if _decode_tokens(here) >= math.ceil(
                (_decode_tokens(here) + _decode_tokens(expected)) / microbatches
            ):
                return now
            fraction = ENTRY_WAIT_FRACTION / microbatches
            waits = [
                (
                    session.waiting_since,
                    fraction * (session.decode_gap_s or self._default_gap_s or 0.0),
                )
                for session in here
            ]
            deadline = min(since + wait_s for since, wait_s in waits)
            lates = [
                session.overdue_at for session in expected if session.next_decode_at <= deadline
            ]
            # A step that waited this long for the expected ones does not leave just before they
            # arrive.
            latest = min(since + OVERDUE_FACTOR * wait_s for since, wait_s in waits)
            return min(latest, max(lates, default=now))
        takes_s = self.cost.predict_s(_decode_tokens(decoding)) * first.num_blocks
        deadline = first.waiting_since + ARRIVAL_WAIT_FRACTION * takes_s
        missed = {time for session in expected for time in session.recent_decode_times}
        if missed.isdisjoint(time for session in decoding for time in session.recent_decode_times):
            quiet_s = IDLE_GAP_FRACTION * takes_s
            last = max(session.waiting_since for session in decoding)
            deadline = min(deadline, last + quiet_s) if quiet_s > MIN_IDLE_GAP_S else now
        return min(deadline, max((session.overdue_at for session in expected), default=now))

    def _wait_for_decodes(self, prefills: Sequence[L], expected: Sequence[L], now: float) -> float:
        """The time until which prefills wait for a decode step: with it they cost little extra."""
        first = min(expected, key=lambda session: session.earliest_decode_at)
        gap_s = (first.earliest_decode_at - now) / prefills[0].num_blocks
        worth_it = self.cost.predict_s(MIN_PREFILL_TOKENS) <= gap_s
        return now if worth_it else first.overdue_at

    def _update_active_clients(self, clients: set[PeerId]) -> None:
        """A client saves at most `MAX_CREDIT_TOKENS` while it has nothing to run."""
        for client in clients - self._active_clients:
            before = self._served_tokens.get(client, self._served_floor)
            self._served_tokens[client] = max(before, self._served_floor - MAX_CREDIT_TOKENS)
        self._active_clients = clients
        self._served_floor = max(
            self._served_floor, min(self._served_tokens[client] for client in clients)
        )

    def _assign_tokens(
        self, plan: list[tuple[L, int]], session: L, tokens: int, now: float
    ) -> None:
        plan.append((session, tokens))
        self._served_tokens[session.client] += tokens
        session.scheduled_at = now

    def _starved_session(self, waiting: Sequence[L]) -> L | None:
        """The session that waited longest, every `STARVATION_INTERVAL` iterations; else None."""
        self._iteration += 1
        if self._iteration % STARVATION_INTERVAL:
            return None
        return min(waiting, key=lambda session: max(session.waiting_since, session.scheduled_at))

    def _select_microbatch(
        self, decoding: Sequence[L], active: Sequence[L], starved: L | None
    ) -> Iterator[L]:
        """Select one microbatch of decoding sessions through the same blocks, in fair order.

        Its size limits only sessions that enter the chain here; at later hops they arrive as the
        microbatch they are. The batch holds at most `_max_microbatch_tokens`, but always its first
        step, so that a large step soon comes first and runs.
        """
        entering = [session for session in active if session.is_entry_hop]
        microbatches = self._microbatches.num_microbatches(len(entering))
        room = max(math.ceil(_decode_tokens(entering) / microbatches), MIN_MICROBATCH_TOKENS)
        span = starved.span if starved is not None else None
        most = None
        for session in self._by_priority(decoding, starved):
            span = span or session.span
            if (room > 0 or not session.is_entry_hop) and session.span == span:
                if most is None:
                    most = self._max_microbatch_tokens(span)
                elif session.queued_tokens > most:
                    return
                yield session
                most -= session.queued_tokens
                room -= session.queued_tokens if session.is_entry_hop else 0

    def _max_microbatch_tokens(self, span: Span) -> int:
        # At least `MAX_DECODE_STEP_TOKENS`, however long they take: many sessions with one token
        # each would wait longer where a larger batch is as cheap.
        limit_s = MAX_ITERATION_S / len(span)
        return max(
            self.cost.max_tokens_within(limit_s, MAX_ITERATION_TOKENS), MAX_DECODE_STEP_TOKENS
        )

    def _prefill_budget(
        self,
        plan: Sequence[tuple[L, int]],
        prefills: Sequence[L],
        decoding: Sequence[L],
        now: float,
        sizes: Sequence[int],
    ) -> int:
        """Tokens beside `plan` that do not delay `decoding` too long. `sizes`: see below."""
        taken = _planned_tokens(plan)
        blocks = (plan[0][0] if plan else prefills[0]).num_blocks
        limit_s, least = MAX_ITERATION_S / blocks, MIN_PREFILL_TOKENS
        if not decoding:
            return max(self.cost.max_tokens_within(limit_s, MAX_ITERATION_TOKENS) - taken, least)
        if taken:
            usual_s = self.cost.predict_s(taken)
            most_s, least = (
                usual_s * (1 + PREFILL_SLOWDOWN * _prefill_pressure(prefills, decoding)),
                MIN_CHUNK_TOKENS,
            )
        else:
            usual_s = self.cost.predict_s(self._last_decode_tokens)
            gap_s = min(session.earliest_decode_at for session in decoding) - now
            most_s = max(usual_s * _prefill_pressure(prefills, decoding), gap_s / blocks)
        room = self.cost.max_tokens_within(min(most_s, limit_s), MAX_ITERATION_TOKENS) - taken
        most = self.cost.max_tokens_within(
            min(MAX_PREFILL_SLOWDOWN * usual_s, limit_s), MAX_ITERATION_TOKENS
        )
        return self._extend_if_cheaper(taken, max(room, least), most - taken, sizes)

    def _extend_if_cheaper(self, taken: int, room: int, most: int, sizes: Sequence[int]) -> int:
        """`room`, or up to `most` tokens beside the `taken` ones if that completes waiting prefills
        at a lower cost per token.

        `sizes` are the waiting tokens of each prefill in fair order, without later chunks of
        prompts that already had their extension.
        """
        before_s = self.cost.predict_s(taken) if taken else 0.0

        def per_token(count: int) -> float:
            return (self.cost.predict_s(taken + count) - before_s) / count

        done = itertools.takewhile(lambda size: size <= most, itertools.accumulate(sizes))
        more = max(done, default=0)
        return (
            more
            if more > room and per_token(more) < MAX_EXTENDED_COST_RATIO * per_token(room)
            else room
        )

    def _by_priority(self, sessions: Sequence[L], starved: L | None) -> Iterator[L]:
        if starved is not None and starved in sessions:
            yield starved
        for priority in range(len(PRIORITIES)):
            yield from self._fair_order(
                session
                for session in sessions
                if session.priority == priority and session is not starved
            )

    def _fair_order(self, sessions: Iterable[L]) -> Iterator[L]:
        """Order by the client's service, least first, then by arrival.

        Tokens assigned between two items count, so the order adapts while it is consumed.
        """
        queues: dict[PeerId, list[L]] = {}
        for session in sorted(sessions, key=lambda session: session.waiting_since, reverse=True):
            queues.setdefault(session.client, []).append(session)
        while queues:
            client = min(queues, key=self._served_tokens.__getitem__)
            yield queues[client].pop()
            if not queues[client]:
                del queues[client]


def _planned_tokens(plan: Sequence[tuple[ScheduledSession, int]]) -> int:
    return sum(count for _, count in plan)


def _decode_tokens(sessions: Iterable[ScheduledSession]) -> int:
    """Decode tokens per round of these sessions."""
    return sum(
        session.queued_tokens if session.is_runnable else session.last_decode_tokens
        for session in sessions
    )


def _prefill_pressure(
    prefills: Sequence[ScheduledSession], decoding: Sequence[ScheduledSession]
) -> float:
    """Waiting sessions per decoding one; those of a client that does not decode count as one."""
    clients = {session.client for session in decoding}
    waiting = sum(session.client in clients for session in prefills)
    waiting += len({session.client for session in prefills} - clients)
    return min(max(waiting / len(decoding), 1.0), MAX_PREFILL_PRESSURE)
