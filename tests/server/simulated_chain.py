"""Sessions through a chain of nodes, simulated: the real policy, invented times."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from functools import partial

from nesa_node.core.ids import PeerId, Span
from nesa_node.server.scheduler.policy import BatchPolicy
from nesa_node.server.scheduler.session_queue import MAX_DECODE_ROW_TOKENS, ScheduledSession

BLOCKS = 4


class Chain:
    """Nodes and a client that answers each output with a step.

    An iteration takes `step_s` and `token_s` for each token beyond the first. At most `processors`
    run at the same time; None: each node has its own.
    """

    def __init__(
        self,
        nodes: int = 3,
        *,
        step_s: float = 0.011,
        token_s: float = 0.0011,
        message_s: float = 0.0003,
        client_s: float = 0.002,
        processors: int | None = None,
    ) -> None:
        self.now = 100.0
        self.step_s, self.token_s = step_s, token_s
        self.message_s, self.client_s = message_s, client_s
        self.nodes = [_Node(self, index) for index in range(nodes)]
        self._free = processors or nodes
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self.arrivals: dict[str, list[float]] = {}
        """When the client got each token of each session."""
        self.prefilled_at: dict[str, float] = {}
        self._prefilling: dict[str, int] = {}
        self._ended: set[str] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def compute(self, seconds: float, done: Callable[[], None]) -> None:
        """Call `done` when a processor has worked on it for so long."""
        self._queue.append((seconds, done))
        self._begin()

    def _begin(self) -> None:
        while self._free and self._queue:
            self._free -= 1
            seconds, done = self._queue.popleft()
            self.at(self.now + seconds, partial(self._end, done))

    def _end(self, done: Callable[[], None]) -> None:
        self._free += 1
        done()
        self._begin()

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end

    def decode(self, count: int, rng: random.Random) -> None:
        """Begin `count` sessions, at some time within the next 50 ms."""
        for name in (f"session {number}" for number in range(count)):
            self.arrivals[name] = []
            self.at(self.now + rng.uniform(0, 0.05), partial(self.nodes[0].take, name, 1))

    def prefill(self, name: str, tokens: int, chunk: int = 128) -> None:
        self._prefilling[name] = tokens
        for start in range(0, tokens, chunk):
            self.nodes[0].take(name, min(chunk, tokens - start))

    def end(self, name: str) -> None:
        self._ended.add(name)
        for node in self.nodes:
            node.lanes.pop(name, None)
            node.iterate()

    def pass_on(self, index: int, number: int, name: str, tokens: int) -> None:
        """The `number`-th of an iteration's outputs leaves a node."""
        delay = self.message_s * (number + 1)
        if index + 1 < len(self.nodes):
            self.at(self.now + delay, lambda: self.nodes[index + 1].take(name, tokens))
        elif name in self._prefilling:
            self._prefilling[name] -= tokens
            if not self._prefilling[name]:
                self.prefilled_at[name] = self.now
        else:
            self.at(self.now + delay + self.client_s, lambda: self._answer(name))

    def _answer(self, name: str) -> None:
        self.arrivals[name].append(self.now)
        self.nodes[0].take(name, 1)

    def takes(self, tokens: int) -> float:
        return self.step_s + self.token_s * (tokens - 1)

    def is_over(self, name: str) -> bool:
        return name in self._ended


class _Node:
    def __init__(self, chain: Chain, index: int) -> None:
        self.lanes: dict[str, ScheduledSession] = {}
        self.rows: list[int] = []
        """How many sessions each iteration had."""
        self._chain = chain
        self._index = index
        self._steps: dict[str, deque[list[int]]] = {}
        self._policy: BatchPolicy[ScheduledSession] = BatchPolicy()
        for tokens in (1, 128):
            self._policy.cost.observe(tokens, chain.takes(tokens) / BLOCKS)
        self._running = False

    def take(self, name: str, tokens: int) -> None:
        if self._chain.is_over(name):
            return
        span, leads = Span(0, BLOCKS), self._index == 0
        if name not in self.lanes:
            self.lanes[name] = ScheduledSession(
                client=PeerId(name), priority=0, span=span, is_entry_hop=leads
            )
            self._steps[name] = deque()
        self._steps[name].append([tokens, tokens])
        self._count(name)
        self.iterate()

    def iterate(self) -> None:
        chain = self._chain
        if self._running:
            return
        pause_s = self._policy.batching_delay_s(self.lanes.values(), chain.now)
        if pause_s > 0:
            chain.at(chain.now + pause_s + 1e-9, self.iterate)
            return
        plan = self._policy.plan(self.lanes.values(), chain.now)
        if plan:
            self._running = True
            self.rows.append(len(plan))
            names = {id(lane): name for name, lane in self.lanes.items()}
            shares = [(names[id(lane)], tokens) for lane, tokens in plan]
            seconds = chain.takes(sum(tokens for _, tokens in plan))
            self._policy.record_iteration(plan, seconds)
            chain.compute(seconds, lambda: self._done(shares))

    def _done(self, shares: list[tuple[str, int]]) -> None:
        self._running = False
        done: list[tuple[str, int]] = []
        for name, tokens in shares:
            steps = self._steps[name]
            while tokens:
                count = min(tokens, steps[0][0])
                steps[0][0] -= count
                tokens -= count
                if not steps[0][0]:
                    done.append((name, steps.popleft()[1]))
            if name in self.lanes:
                self._count(name)
        for number, (name, tokens) in enumerate(done):
            self._chain.pass_on(self._index, number, name, tokens)
        self.iterate()

    def _count(self, name: str) -> None:
        lane, steps = self.lanes[name], self._steps[name]
        lane.queued_tokens = sum(left for left, _ in steps)
        if steps:
            lane.has_decode_step = (
                len(steps) == 1 and steps[0][0] == steps[0][1] <= MAX_DECODE_ROW_TOKENS
            )
            lane.waiting_since = self._chain.now
