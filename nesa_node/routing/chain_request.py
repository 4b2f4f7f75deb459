"""Requests for a chain, and the problem of choosing it: a snapshot's nodes as arrays of seconds.

N nodes, B blocks of the session's span, numbered from 0. All times are for one *step* of the
session: one token of each row when decoding, a chunk of the prompt when prefilling. Where a request
has a prompt, its time is spread over the steps that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nesa_node.core.arrays import Floats, Ints, row_blocks
from nesa_node.core.ids import PeerId, Span
from nesa_node.topology.snapshot import NodeState, Snapshot


@dataclass(frozen=True, slots=True, order=True)
class Visit:
    """A run of blocks `start <= b < end` of the problem on node number `node`."""

    node: int
    start: int
    end: int


Chain = tuple[Visit, ...]


_TIME_FIELDS = ("block_s_N", "visit_s_N", "entry_s_N", "exit_s_N", "transfer_s_NN")
_NODE_FIELDS = (
    *("starts_N", "ends_N", "load_N", "spare_N", "cache_N", "pressure_N"),
    *("reliability_N", "stability_N"),
    *("block_s_N", "visit_s_N", "entry_s_N", "exit_s_N"),
)


@dataclass(frozen=True, slots=True, eq=False)
class ChainProblem:
    """N nodes from which a chain is chosen.

    The time of a step through a chain is the sum of: `entry_s_N` of the first node (from the
    client), for every visit `visit_s_N` plus its blocks times `block_s_N` times (1 + `load_N`),
    `transfer_s_NN[i, j]` where i sends to j, and `exit_s_N` of the last node (to the client).

    `starts_N`, `ends_N`: the blocks that a node holds, clipped to the problem's. `visit_s_N`: fixed
    cost of a visit, failure penalties included. `load_N`: share of its time that a node is busy
    with other sessions, 0 idle, 1 saturated. `spare_N`: G of eq. 18, free share of the memory with
    the weights; `cache_N`: that of the KV cache; `pressure_N`: used share of the machine's memory,
    in C of eq. 18, 0 if unknown. `reliability_N`: R of eq. 18, probability that the node is
    available when needed; `stability_N`: topological stability (homology), 1 if unknown.

    Raises `ValueError` for other shapes, NaN, times and loads below 0, and spans outside the
    problem's. Times may be infinite: such nodes and links are not used.
    """

    peers: tuple[PeerId, ...]
    num_blocks: int
    starts_N: Ints
    ends_N: Ints
    block_s_N: Floats
    visit_s_N: Floats
    load_N: Floats
    spare_N: Floats
    cache_N: Floats
    pressure_N: Floats
    reliability_N: Floats
    stability_N: Floats
    entry_s_N: Floats
    exit_s_N: Floats
    transfer_s_NN: Floats

    def __post_init__(self) -> None:
        size = self.num_nodes
        for name in _NODE_FIELDS:
            if getattr(self, name).shape != (size,):
                raise ValueError(f"{name} must have shape {(size,)}")
        if self.transfer_s_NN.shape != (size, size):
            raise ValueError(f"transfer_s_NN must have shape {(size, size)}")
        spans = (self.starts_N >= 0) & (self.starts_N <= self.ends_N)
        if not (spans & (self.ends_N <= self.num_blocks)).all():
            raise ValueError(f"spans must lie within 0:{self.num_blocks}")
        for name in (*_TIME_FIELDS, "load_N"):
            # `not >=` instead of `<` also rejects NaN.
            if not getattr(self, name).min(initial=0.0) >= 0.0:
                raise ValueError(f"{name} must not be negative or NaN")
        for name in ("spare_N", "cache_N", "pressure_N", "reliability_N", "stability_N"):
            shares_N = getattr(self, name)
            if not ((shares_N >= 0.0) & (shares_N <= 1.0)).all():
                raise ValueError(f"{name} must lie within 0 and 1")
        if not np.isfinite(self.load_N).all():
            raise ValueError("load_N must be finite")

    @property
    def num_nodes(self) -> int:
        return len(self.peers)

    @property
    def busy_block_s_N(self) -> Floats:
        """Seconds per block, queueing behind other sessions included."""
        return self.block_s_N * (1.0 + self.load_N)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step through a chain, by cause."""

    entry_s: float
    visits_s: float
    compute_s: float
    transfer_s: float
    exit_s: float

    @property
    def total_s(self) -> float:
        return self.entry_s + self.visits_s + self.compute_s + self.transfer_s + self.exit_s


def step_time(problem: ChainProblem, chain: Sequence[Visit]) -> StepTime:
    """The time of a step through `chain`. Raises `ValueError` if it does not fit the problem."""
    check_chain(problem, chain)
    if not chain:
        return StepTime(0.0, 0.0, 0.0, 0.0, 0.0)
    nodes = [visit.node for visit in chain]
    lengths = np.array([visit.end - visit.start for visit in chain])
    return StepTime(
        entry_s=float(problem.entry_s_N[nodes[0]]),
        visits_s=float(problem.visit_s_N[nodes].sum()),
        compute_s=float((problem.busy_block_s_N[nodes] * lengths).sum()),
        transfer_s=float(problem.transfer_s_NN[nodes[:-1], nodes[1:]].sum()),
        exit_s=float(problem.exit_s_N[nodes[-1]]),
    )


def check_chain(problem: ChainProblem, chain: Sequence[Visit]) -> None:
    """Raise `ValueError` unless `chain` runs every block once, in order, where it is held."""
    at = 0
    for visit in chain:
        if visit.start != at or visit.end <= visit.start:
            raise ValueError(f"blocks are not in order at {visit}, expected to go on from {at}")
        held = range(int(problem.starts_N[visit.node]), int(problem.ends_N[visit.node]))
        if visit.start not in held or visit.end - 1 not in held:
            raise ValueError(f"{visit} runs blocks that node {visit.node} does not hold")
        at = visit.end
    if at != problem.num_blocks:
        raise ValueError(f"the chain ends at block {at} of {problem.num_blocks}")


TOKENS_PER_SESSION = 200
"""Assumed tokens of a session, over which a recovery is spread."""
RECOVERY_S = 10.0
"""Seconds to recover from a lost node: detect it, find a replacement, replay the cache
(`python -m benchmarks churn`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostWeights:
    """Weights of the default cost of sessions, beside a step's seconds, which have weight 1.

    `failure`: of the expected loss by failures. `stability`: of that loss with `stability_N` for
    the reliability. `load`: of the time spent queueing behind other sessions.

    The shipped weight of stability is 0, since it gains nothing (`benchmarks tuning`); nothing then
    computes it.
    """

    failure: float = 1.0
    stability: float = 0.0
    load: float = 1.0

    def __post_init__(self) -> None:
        if not all(
            0.0 <= each < float("inf") for each in (self.failure, self.stability, self.load)
        ):
            raise ValueError(f"weights must be finite, not below 0: {self}")


SHIPPED_WEIGHTS = CostWeights()


def expected_loss_s(problem: ChainProblem, weights: CostWeights = SHIPPED_WEIGHTS) -> Floats:
    """Expected seconds lost per token by a visit to each node, float64 [N].

    A node that fails interrupts the session once, until a replacement has taken over: the loss is
    the probability of failure times the recovery time, divided by the tokens of the session.
    `benchmarks routing` measures the effect on latency.
    """
    seconds_N = weights.failure * loss_seconds(problem.reliability_N)
    seconds_N += weights.stability * loss_seconds(problem.stability_N)
    return seconds_N


def loss_seconds(reliability_N: Floats) -> Floats:
    """Seconds lost per token by visits to nodes of these reliabilities, float64 [N]."""
    seconds_N: Floats = (1.0 - reliability_N) * (RECOVERY_S / TOKENS_PER_SESSION)
    return seconds_N


def apply_weights(problem: ChainProblem, weights: CostWeights = SHIPPED_WEIGHTS) -> ChainProblem:
    """`problem` with the expected loss added to each visit's cost, and its loads weighed."""
    return replace(
        problem,
        visit_s_N=problem.visit_s_N + expected_loss_s(problem, weights),
        load_N=weights.load * problem.load_N,
    )


def weighed_terms(
    problem: ChainProblem, chain: Chain, weights: CostWeights = SHIPPED_WEIGHTS
) -> dict[str, float]:
    """What `apply_weights` adds to a step through `chain`, in seconds, by cause.

    Causes that are not weighed are left out.
    """
    nodes = [visit.node for visit in chain]
    lengths = np.array([visit.end - visit.start for visit in chain], dtype=np.float64)
    queueing_s = float((problem.block_s_N * problem.load_N)[nodes] @ lengths)

    def lost_s(only: CostWeights) -> float:
        return float(expected_loss_s(problem, only)[nodes].sum())

    terms = {"failures_s": lost_s(CostWeights(failure=weights.failure))}
    if weights.stability > 0.0:
        terms["stability_s"] = lost_s(CostWeights(failure=0.0, stability=weights.stability))
    if weights.load != 1.0:
        terms["queueing_s"] = (weights.load - 1.0) * queueing_s
    return terms


NodeValues = Mapping[PeerId, float] | Floats | None
"""Values by peer, or an array in the order of `Snapshot.nodes`; missing and NaN are unknown."""

MessageSeconds = Callable[[float, Floats], Floats]
"""Seconds to encode, transmit and decode a message of so many bytes, at rates in bytes/s; as a new
array."""

PROMPT_OVERLAP = 0.5
"""Share of a prompt's times on all nodes that counts: its chunks run on several at once."""
DEFAULT_RTT_MS = 100.0
"""Assumed for an unmeasured link: intercontinental, so that a measured near link wins."""
DEFAULT_BYTES_PER_S = 1.25e6
"""Assumed for a link without an observed transfer: 10 Mbit/s, a usual home uplink."""
DEFAULT_BLOCK_S = 0.01
"""Assumed seconds per token and block if no node has measured its speed."""
MIN_TOKENS_PER_S = 1e-3
"""Lower bound on announced speeds: unusably slow, but keeps all times finite."""
_UNMEASURED_QUANTILE = 0.9
"""Quantile of the measured times that stands for unmeasured nodes. Below 1, so that one node that
understates its speed does not set it."""
_MAX_TIMES_MEDIAN = 10.0
"""Upper bound on that quantile in medians: in a small swarm the quantile is the slowest node."""
VISIT_OVERHEAD_S = 0.001
"""Seconds per visit beside compute, to receive a small message and forward it
(`python -m benchmarks hop`, measured on a slow core)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainRequest:
    """Requirements of a session on its chain.

    `span`: the blocks to run. `tokens`: tokens of one step over all rows; 1 when decoding, a chunk
    of the prompt when prefilling. `prompt_tokens`: tokens over all rows of a prompt that the chain
    computes first; `PROMPT_OVERLAP` of its computation and transfers, summed over the chain, is
    spread over `output_tokens` steps.
    `bytes_per_token`: size of hidden states; `message_s`: their time on a link where a codec may be
    used, None without one.
    `entry_rtt_ms`: round trips between the client and nodes; `entry_bytes_per_s` is the rate from
    the client, `exit_bytes_per_s` the rate back. `penalties_s`: extra seconds per visit to a node,
    for failures and doubts. `stability`: topological stability of nodes, 1 if missing. Nodes in
    `exclude`, and nodes with fewer than `min_free_tokens` of free cache, are not used.
    """

    span: Span
    tokens: int = 1
    prompt_tokens: int = 0
    output_tokens: int = TOKENS_PER_SESSION
    bytes_per_token: float = 16_384.0
    message_s: MessageSeconds | None = None
    entry_rtt_ms: NodeValues = None
    entry_bytes_per_s: NodeValues = None
    exit_bytes_per_s: NodeValues = None
    penalties_s: Mapping[PeerId, float] = field(default_factory=dict)
    stability: Mapping[PeerId, float] = field(default_factory=dict)
    exclude: frozenset[PeerId] = frozenset()
    min_free_tokens: int = 0
    visit_s: float = VISIT_OVERHEAD_S
    default_rtt_ms: float = DEFAULT_RTT_MS
    default_bytes_per_s: float = DEFAULT_BYTES_PER_S

    def __post_init__(self) -> None:
        if len(self.span) == 0 or self.tokens < 1:
            raise ValueError(f"nothing to run: blocks {self.span}, {self.tokens} tokens")
        if self.prompt_tokens < 0 or self.output_tokens < 1:
            raise ValueError(
                f"no prompt of {self.prompt_tokens} tokens for {self.output_tokens} steps"
            )

    @property
    def prompt_share(self) -> float:
        """Share of a prompt's seconds that counts in one step."""
        return PROMPT_OVERLAP / self.output_tokens


def build_problem(snapshot: Snapshot, request: ChainRequest) -> ChainProblem:
    """The chain problem over the nodes of `snapshot` that hold a part of `request.span`.

    Nodes keep the snapshot's order. A transfer takes half a round trip plus the message's bytes at
    the link's rate. Unknown links get the request's defaults, unmeasured nodes the speed of a slow
    measured node: a node gains nothing by announcing no speed.
    """
    rows = np.array(
        [row for row, node in enumerate(snapshot.nodes) if _is_usable(node, request)],
        dtype=np.int64,
    )
    nodes = [snapshot.nodes[row] for row in rows]
    peers = tuple(node.peer_id for node in nodes)
    span = request.span
    entry_s_N, exit_s_N = client_seconds(
        request,
        _values_at(request.entry_rtt_ms, snapshot, rows),
        _values_at(request.entry_bytes_per_s, snapshot, rows),
        _values_at(request.exit_bytes_per_s, snapshot, rows),
    )
    return ChainProblem(
        peers=peers,
        num_blocks=len(span),
        starts_N=_ints([max(node.span.start, span.start) - span.start for node in nodes]),
        ends_N=_ints([min(node.span.end, span.end) - span.start for node in nodes]),
        block_s_N=_step_block_seconds(nodes, request),
        visit_s_N=request.visit_s + _floats([request.penalties_s.get(peer, 0.0) for peer in peers]),
        load_N=_floats([node.load for node in nodes]),
        spare_N=_floats([_spare_share(node) for node in nodes]),
        cache_N=_floats([_free_cache_share(node) for node in nodes]),
        pressure_N=_floats([_memory_pressure(node) for node in nodes]),
        reliability_N=_floats([node.reliability for node in nodes]),
        stability_N=_floats([request.stability.get(peer, 1.0) for peer in peers]),
        entry_s_N=entry_s_N,
        exit_s_N=exit_s_N,
        transfer_s_NN=transfer_seconds(snapshot, peers, request),
    )


def client_seconds(
    request: ChainRequest, rtt_ms_N: Floats, up_N: Floats, down_N: Floats
) -> tuple[Floats, Floats]:
    """Seconds of a step's message from the client to each node, and from there back, [N] each.

    NaN is unknown in round trips, and in rates from and to the client. Of a prompt the client gets
    the last token alone.
    """
    one_way_s_N = _one_way_s(rtt_ms_N, request)
    back = replace(request, prompt_tokens=0)
    return one_way_s_N + _message_s(up_N, request), one_way_s_N + _message_s(down_N, back)


def _step_block_seconds(nodes: Sequence[NodeState], request: ChainRequest) -> Floats:
    seconds_N = block_seconds(nodes, request.tokens)
    if request.prompt_tokens:
        seconds_N += request.prompt_share * block_seconds(nodes, request.prompt_tokens)
    return seconds_N


def block_seconds(nodes: Sequence[NodeState], tokens: int) -> Floats:
    """Seconds for a step of `tokens` through one block of each idle node, float64 [N].

    One token runs at decode speed, more tokens at prefill speed. An unmeasured node counts as slow
    as the slow measured ones; without measured nodes, `DEFAULT_BLOCK_S` per token.
    """
    speed_N = _floats(
        [node.decode_tokens_per_s if tokens == 1 else node.prefill_tokens_per_s for node in nodes]
    )
    length_N = _floats([max(len(node.span), 1) for node in nodes])
    measured_N = (speed_N > 0) & np.isfinite(speed_N)
    block_s_N = np.full(len(nodes), DEFAULT_BLOCK_S * tokens)
    clipped = np.maximum(speed_N[measured_N], MIN_TOKENS_PER_S)
    block_s_N[measured_N] = tokens / (clipped * length_N[measured_N])
    if measured_N.any():
        slow_s = np.quantile(block_s_N[measured_N], _UNMEASURED_QUANTILE, method="higher")
        median_s = np.quantile(block_s_N[measured_N], 0.5, method="lower")
        block_s_N[~measured_N] = min(slow_s, _MAX_TIMES_MEDIAN * median_s)
    return block_s_N


def _is_usable(node: NodeState, request: ChainRequest) -> bool:
    return (
        node.span.start < request.span.end
        and request.span.start < node.span.end
        and len(node.span) > 0
        and node.peer_id not in request.exclude
        and node.free_cache_tokens >= request.min_free_tokens
    )


def _spare_share(node: NodeState) -> float:
    share = node.free_memory_share
    return _free_cache_share(node) if share is None else share


def _memory_pressure(node: NodeState) -> float:
    free, total = node.cpu_memory_free_bytes, node.cpu_memory_total_bytes
    return min(max(1.0 - free / total, 0.0), 1.0) if total > 0 else 0.0


def _free_cache_share(node: NodeState) -> float:
    if node.total_cache_tokens <= 0:
        return max(0.0, 1.0 - node.load)
    return min(1.0, max(0.0, node.free_cache_tokens / node.total_cache_tokens))


def _values_at(values: NodeValues, snapshot: Snapshot, rows: Ints) -> Floats:
    """The values of the nodes at `rows`; NaN if missing."""
    if values is None:
        return np.full(len(rows), np.nan)
    if isinstance(values, Mapping):
        nodes = snapshot.nodes
        return _floats([values.get(nodes[row].peer_id, np.nan) for row in rows])
    if values.shape != (len(snapshot.nodes),):
        raise ValueError(f"{values.shape} values for {len(snapshot.nodes)} nodes")
    return values[rows]


def transfer_seconds(snapshot: Snapshot, peers: Sequence[PeerId], request: ChainRequest) -> Floats:
    """Seconds for the step's message from node i to node j, [N, N]; 0 on the diagonal."""
    size = len(peers)
    if snapshot.links is None:
        nothing_NN = np.full((size, size), np.nan)
        transfer_s_NN = _one_way_s(nothing_NN, request) + _message_s(nothing_NN, request)
    else:
        rtt_ms_NN, rate_NN = snapshot.links.select_arrays(peers)
        transfer_s_NN = _one_way_s(rtt_ms_NN, request)
        # Row by row: of thousands of nodes each matrix in between would take hundreds of MB.
        for start, rate_RN in row_blocks(rate_NN):
            transfer_s_NN[start : start + len(rate_RN)] += _message_s(rate_RN, request)
    np.fill_diagonal(transfer_s_NN, 0.0)
    return transfer_s_NN


def _one_way_s(rtt_ms: Floats, request: ChainRequest) -> Floats:
    """Seconds one way, as a new array."""
    seconds = np.where(np.isnan(rtt_ms), request.default_rtt_ms, rtt_ms)
    seconds *= 0.0005
    return seconds


def _message_s(bytes_per_s: Floats, request: ChainRequest) -> Floats:
    """Seconds to transmit a step's message, as a new array."""
    known = bytes_per_s > 0  # False for NaN; a rate of zero is treated as unknown
    rate = np.where(known, bytes_per_s, request.default_bytes_per_s)
    message_s = request.message_s or _uncompressed_s
    seconds = message_s(request.tokens * request.bytes_per_token, rate)
    if request.prompt_tokens:
        nbytes = request.prompt_tokens * request.bytes_per_token
        seconds += request.prompt_share * message_s(nbytes, rate)
    return seconds


def _uncompressed_s(nbytes: float, bytes_per_s: Floats) -> Floats:
    return nbytes / bytes_per_s


def _floats(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)
