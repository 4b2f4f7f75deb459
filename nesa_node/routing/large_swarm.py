"""Chains in swarms of many thousand nodes: candidates come branch by branch of the merge tree.

An exact search over 50,000 nodes would need the links of all pairs. Few of these nodes can be in
the best chain: those that run a block at little cost, in a branch that is not far from the client.
A snapshot is prepared once: the tree of the nodes' clusters is cut at the height at which regions
are apart, and each branch lists its cheapest holders of every block. A session ranks the branches
by what a chain within each would cost it at least, takes their lists in that order up to a limit,
and searches exactly among these candidates. What lists cannot know (exclusions, full caches, a
client's penalties) counts when they are read, or in the search.

N nodes, G branches, B blocks, M holders per block and branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from nesa_node.core.arrays import Bools, Floats, Ints
from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.chain_request import (
    ChainRequest,
    NodeValues,
    block_seconds,
    client_seconds,
    loss_seconds,
)
from nesa_node.routing.chains import ChainChooser, Hop, plan_chain
from nesa_node.routing.search.exact import exact_latency
from nesa_node.topology.links.sparse import SparseLinks
from nesa_node.topology.shape.failure_domains import (
    MIN_SEPARATION_MS,
    cluster_tree,
    failure_domains,
    members_DN,
)
from nesa_node.topology.shape.merge_tree import components_at
from nesa_node.topology.snapshot import Snapshot

MAX_CHAIN_CANDIDATES = 384
"""Nodes among which a chain is searched."""
MAX_ADDED_HOLDERS = 64
HOLDERS_PER_BLOCK = 8
"""Holders of a block that a branch lists."""


@dataclass(frozen=True, slots=True, eq=False)
class LargeSwarm:
    """A snapshot prepared for sessions whose steps are alike (`prepare_large_swarm`).

    `busy_block_s_N`, `visit_s_N`: seconds per block, and per visit: the expected loss and the
    node's own access link, in and out. `cost_s_N`: both per block of a node's whole span.
    `domains_DN`: its failure domains.
    `cheapest_GBM`: nodes, the cheapest first, -1 where a branch has fewer. `least_s_GB`: the cost
    of the first, inf without one.
    """

    snapshot: Snapshot
    links: SparseLinks
    row_of: Mapping[PeerId, int]
    starts_N: Ints
    ends_N: Ints
    free_tokens_N: Ints
    block_s_N: Floats
    busy_block_s_N: Floats
    visit_s_N: Floats
    cost_s_N: Floats
    branch_N: Ints
    domains_DN: Bools
    cheapest_GBM: Ints
    least_s_GB: Floats

    def restrict(self, rows: Ints) -> Snapshot:
        """The snapshot of a few nodes with all links among them, in the order of `rows`."""
        nodes = tuple(self.snapshot.nodes[row] for row in rows.tolist())
        return replace(self.snapshot, nodes=nodes, joining=(), links=self.links.select(rows))

    def with_spans(self, spans: Mapping[PeerId, Span], like: ChainRequest) -> LargeSwarm:
        """The swarm after moves, prepared again."""
        nodes = tuple(
            node.with_span(spans.get(node.peer_id, node.span)) for node in self.snapshot.nodes
        )
        return prepare_large_swarm(replace(self.snapshot, nodes=nodes), self.links, like)

    def without(self, kept: Ints, like: ChainRequest) -> LargeSwarm:
        """The swarm of the nodes `kept` alone, prepared again."""
        nodes = tuple(self.snapshot.nodes[row] for row in kept.tolist())
        return prepare_large_swarm(
            replace(self.snapshot, nodes=nodes), self.links.restrict(kept), like
        )

    def restrict_request(self, request: ChainRequest, rows: Ints) -> ChainRequest:
        """`request` with the client's links to a few nodes."""
        peers = [self.links.peers[row] for row in rows.tolist()]

        def chosen(values: NodeValues) -> NodeValues:
            if values is None:
                return None
            return dict(zip(peers, self.node_values(values)[rows].tolist(), strict=True))

        return replace(
            request,
            entry_rtt_ms=chosen(request.entry_rtt_ms),
            entry_bytes_per_s=chosen(request.entry_bytes_per_s),
            exit_bytes_per_s=chosen(request.exit_bytes_per_s),
        )

    def node_values(self, values: NodeValues) -> Floats:
        """`values` in the order of nodes, [N]; NaN if missing."""
        if isinstance(values, np.ndarray):
            return values
        values_N = np.full(len(self.links), np.nan)
        for peer, value in (values or {}).items():
            if peer in self.row_of:
                values_N[self.row_of[peer]] = value
        return values_N

    def away_s_N(self, request: ChainRequest) -> Floats:
        """Seconds from the client to each node and from there back, [N]."""
        entry_s_N, exit_s_N = client_seconds(
            request,
            self.node_values(request.entry_rtt_ms),
            self.node_values(request.entry_bytes_per_s),
            self.node_values(request.exit_bytes_per_s),
        )
        return entry_s_N + exit_s_N

    def usable_N(self, request: ChainRequest) -> Bools:
        """The nodes that `request` may use, as `build_problem` chooses them."""
        usable_N: Bools = self.free_tokens_N >= request.min_free_tokens
        usable_N[[self.row_of[peer] for peer in request.exclude if peer in self.row_of]] = False
        return usable_N


def prepare_large_swarm(snapshot: Snapshot, links: SparseLinks, like: ChainRequest) -> LargeSwarm:
    """Prepare the serving nodes of `snapshot`, whose links are `links` in the same order.

    `like`: a request with the tokens, bytes and seconds per visit of the sessions to come; its
    client does not matter. Raises `ValueError` if the links are not those of the nodes.
    """
    nodes = snapshot.nodes
    if links.peers != tuple(node.peer_id for node in nodes):
        raise ValueError("the links must be those of the snapshot's nodes, in their order")
    starts_N = np.array([node.span.start for node in nodes], dtype=np.int64)
    ends_N = np.array([node.span.end for node in nodes], dtype=np.int64)
    # A message enters and leaves by the node's own access link: half a round trip each.
    visit_s_N = like.visit_s + 1e-3 * links.height_ms_N
    visit_s_N += loss_seconds(np.array([node.reliability for node in nodes]))
    up_N = np.where(links.rates.up_N > 0, links.rates.up_N, like.default_bytes_per_s)
    visit_s_N += like.tokens * like.bytes_per_token / up_N
    block_s_N = block_seconds(nodes, like.tokens)
    busy_block_s_N = block_s_N * (1.0 + np.array([node.load for node in nodes]))
    cost_s_N = busy_block_s_N + visit_s_N / np.maximum(ends_N - starts_N, 1)
    branch_P = components_at(cluster_tree(links), MIN_SEPARATION_MS)
    branch_N = branch_P[links.cluster_N]
    cheapest_GBM = _cheapest_holders(branch_N, cost_s_N, starts_N, ends_N, snapshot.num_blocks)
    first_GB = cheapest_GBM[:, :, 0]
    return LargeSwarm(
        snapshot=snapshot,
        links=links,
        row_of={peer: row for row, peer in enumerate(links.peers)},
        starts_N=starts_N,
        ends_N=ends_N,
        free_tokens_N=np.array([node.free_cache_tokens for node in nodes], dtype=np.int64),
        block_s_N=block_s_N,
        busy_block_s_N=busy_block_s_N,
        visit_s_N=visit_s_N,
        cost_s_N=cost_s_N,
        branch_N=branch_N,
        domains_DN=members_DN(failure_domains(snapshot, links), links.peers),
        cheapest_GBM=cheapest_GBM,
        least_s_GB=np.where(first_GB >= 0, cost_s_N[first_GB], np.inf),
    )


def _cheapest_holders(
    branch_N: Ints, cost_s_N: Floats, starts_N: Ints, ends_N: Ints, num_blocks: int
) -> Ints:
    blocks_B = np.arange(num_blocks)
    found_GBM = np.full((int(branch_N.max()) + 1, num_blocks, HOLDERS_PER_BLOCK), -1)
    for branch in range(len(found_GBM)):
        nodes = np.flatnonzero(branch_N == branch)
        nodes = nodes[np.argsort(cost_s_N[nodes], kind="stable")]
        holds_NB = (starts_N[nodes, None] <= blocks_B) & (blocks_B < ends_N[nodes, None])
        place_NB = np.cumsum(holds_NB, axis=0, dtype=np.int32) - 1
        row, block = np.nonzero(holds_NB & (place_NB < HOLDERS_PER_BLOCK))
        found_GBM[branch, block, place_NB[row, block]] = nodes[row]
    return found_GBM


def choose_candidates(
    swarm: LargeSwarm, request: ChainRequest, most: int = MAX_CHAIN_CANDIDATES
) -> Ints:
    """The nodes among which the chain for `request` is searched, ascending.

    Branches are ranked by the way from the client to the branch's nearest node and back, and each
    block at its least cost in the branch, or anywhere if the branch has no holder. Their lists are
    read place by place until there are `most` nodes. Where these leave a block without a holder,
    its cheapest usable holders are added.
    """
    span = slice(request.span.start, request.span.end)
    usable_N = swarm.usable_N(request)
    away_s_N = swarm.away_s_N(request)
    away_s_G = np.full(len(swarm.least_s_GB), np.inf)
    np.minimum.at(away_s_G, swarm.branch_N[usable_N], away_s_N[usable_N])
    least_s_GB = swarm.least_s_GB[:, span]
    least_s_GB = np.where(np.isfinite(least_s_GB), least_s_GB, least_s_GB.min(axis=0))
    chosen_N = np.zeros(len(usable_N), dtype=np.bool_)
    for branch in np.argsort(away_s_G + least_s_GB.sum(axis=1), kind="stable"):
        for listed_B in swarm.cheapest_GBM[branch, span].T:
            chosen_N[listed_B[listed_B >= 0]] = True
            chosen_N &= usable_N
            if np.count_nonzero(chosen_N) >= most:
                return add_missing_holders(swarm, request, np.flatnonzero(chosen_N))
    return add_missing_holders(swarm, request, np.flatnonzero(chosen_N))


def add_missing_holders(swarm: LargeSwarm, request: ChainRequest, rows: Ints) -> Ints:
    """`rows`, ascending, and the usable holders of the blocks that none of these holds."""
    usable_N = swarm.usable_N(request)
    rows = np.unique(rows)
    for block in range(request.span.start, request.span.end):
        if not ((swarm.starts_N[rows] <= block) & (block < swarm.ends_N[rows])).any():
            holds_N = usable_N & (swarm.starts_N <= block) & (block < swarm.ends_N)
            holders = np.flatnonzero(holds_N)
            cheapest = holders[np.argsort(swarm.cost_s_N[holders], kind="stable")]
            rows = np.union1d(rows, cheapest[:MAX_ADDED_HOLDERS])
    return rows


def plan_large_chain(
    swarm: LargeSwarm,
    request: ChainRequest,
    *,
    choose: ChainChooser = exact_latency,
    most: int = MAX_CHAIN_CANDIDATES,
) -> tuple[Hop, ...]:
    """`plan_chain` among the candidates of a large swarm. Raises `MissingBlocksError`."""
    rows = choose_candidates(swarm, request, most)
    return plan_chain(swarm.restrict(rows), swarm.restrict_request(request, rows), choose=choose)
