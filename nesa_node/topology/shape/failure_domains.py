"""Failure domains: groups of nodes that may fail together, such as those of a region.

Regions need no labels: they show in the merge tree (single linkage, H0) of round trips. Nodes of
one region join each other far below the height at which the region joins the next one. A round trip
also contains both ends' access delays, at home 10 ms or more, which hide regions that are nearer
than that. So these are subtracted first.

Legend: N nodes, K nearest nodes of one, D domains.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np

from nesa_node.core.arrays import Bools, Floats, Ints, row_blocks
from nesa_node.core.ids import PeerId
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.links.sparse import SparseLinks
from nesa_node.topology.shape.merge_tree import (
    MergeTree,
    make_filtration,
    merge_tree,
)
from nesa_node.topology.snapshot import NodeState, Snapshot

DomainKind = Literal["branch", "operator", "subnet", "machine"]
DeclaredDomain = tuple[DomainKind, str]
"""An operator, a subnet or a machine, by its name or address."""

MIN_SEPARATION_MS = 4.0
"""Round trip, less access delays, from which on two groups of nodes are apart: about 200 km."""
MIN_PERSISTENCE = 1.5
"""Least ratio of the height at which a branch joins the next to that at which it is complete."""
_NEAREST = 8
_LOW_QUANTILE = 0.1
_MIN_WEIGHT_MS = 0.1
_MAX_DECLARED_DOMAINS = 256
"""Addresses and operators in records are claims, and each could make a domain."""
_RELAYED = "/p2p-circuit"
_IP = re.compile(r"^/ip[46]/([^/]+)")


@dataclass(frozen=True, slots=True)
class FailureDomain:
    """Two or more nodes that may fail together: of a branch, operator, subnet or machine."""

    kind: DomainKind
    peers: frozenset[PeerId]


def failure_domains(
    snapshot: Snapshot, sparse: SparseLinks | None = None
) -> tuple[FailureDomain, ...]:
    """Failure domains of the serving and joining nodes, each set of nodes once.

    A domain of all nodes is left out: no placement can survive its loss. `sparse`: links of a large
    swarm, whose snapshot has none.
    """
    nodes = (*snapshot.nodes, *snapshot.joining)
    everyone = frozenset(node.peer_id for node in nodes)
    found: dict[frozenset[PeerId], DomainKind] = {}
    if snapshot.links is not None:
        for branch in _link_branches(snapshot.links):
            found.setdefault(branch & everyone, "branch")
    if sparse is not None:
        for branch in _sparse_branches(sparse):
            found.setdefault(branch & everyone, "branch")
    for kind, peers in _declared_groups(nodes):
        found.setdefault(peers, kind)
    return tuple(
        FailureDomain(kind, peers)
        for peers, kind in found.items()
        if 1 < len(peers) < len(everyone)
    )


def peers_failing_with(snapshot: Snapshot, peer: PeerId) -> frozenset[PeerId]:
    """The other nodes of the peer's machine, subnet and operator, and of its innermost branch."""
    around = [domain for domain in failure_domains(snapshot) if peer in domain.peers]
    branches = [domain.peers for domain in around if domain.kind == "branch"]
    near = [domain.peers for domain in around if domain.kind != "branch"]
    innermost = sorted(branches, key=len)[:1]
    return frozenset[PeerId]().union(*near, *innermost) - {peer}


def members_DN(domains: Sequence[FailureDomain], peers: Sequence[PeerId]) -> Bools:
    """Which of `peers` each domain has, [D, N]; without domains that have none or all of them."""
    rows = {peer: row for row, peer in enumerate(peers)}
    found_DN = np.zeros((len(domains), len(peers)), dtype=np.bool_)
    for domain, members_N in zip(domains, found_DN, strict=True):
        members_N[[rows[peer] for peer in domain.peers if peer in rows]] = True
    sizes_D = found_DN.sum(axis=1)
    return np.asarray(found_DN[(sizes_D > 0) & (sizes_D < len(peers))])


_BRANCHES: WeakKeyDictionary[Links, tuple[frozenset[PeerId], ...]] = WeakKeyDictionary()
"""Branches of links that are in use: planners score many placements of one snapshot."""


def _link_branches(links: Links) -> tuple[frozenset[PeerId], ...]:
    """Branches of the merge tree of `links`, computed once."""
    found = _BRANCHES.get(links)
    if found is None:
        tree = merge_tree(make_filtration(backbone_ms(links.rtt_ms_NN)))
        branches = persistent_branches(tree, min_height=MIN_SEPARATION_MS)
        found = tuple(frozenset(links.peers[node] for node in branch) for branch in branches)
        _BRANCHES[links] = found
    return found


def _sparse_branches(links: SparseLinks) -> Iterator[frozenset[PeerId]]:
    """Persistent branches of the tree of clusters; one cluster may be a branch of many nodes."""
    tree = cluster_tree(links)
    for branch in persistent_branches(tree, min_height=MIN_SEPARATION_MS, min_leaves=1):
        inside_N = np.isin(links.cluster_N, branch)
        yield frozenset(links.peers[node] for node in np.flatnonzero(inside_N).tolist())


def cluster_tree(links: SparseLinks) -> MergeTree:
    """The merge tree of the clusters of `links`, by round trips without access delays in ms."""
    return merge_tree(make_filtration(links.backbone_ms_PP()))


def backbone_ms(rtt_ms_NN: Floats) -> Floats:
    """Round trips without both ends' access delays, [N, N]; inf where unknown, at least 0.1 ms."""
    access_N = access_delays_ms(rtt_ms_NN)
    weight_NN = np.where(np.isnan(rtt_ms_NN), np.inf, rtt_ms_NN)
    for start, rows in row_blocks(weight_NN):
        # Both ends are added first: that is symmetric to the last bit.
        rows -= access_N[start : start + len(rows), None] + access_N
        np.maximum(rows, _MIN_WEIGHT_MS, out=rows)
    np.fill_diagonal(weight_NN, 0.0)
    return weight_NN


def access_delays_ms(rtt_ms_NN: Floats) -> Floats:
    """The part of a node's round trips that all of them share, in ms, [N]; 0 if unknown.

    For nodes j and k around i, (rtt_ij + rtt_ik - rtt_jk) / 2 (the Gromov product) is what both
    ways from i have in common. A low quantile over the nearest nodes: detours only add.
    """
    count = len(rtt_ms_NN)
    access_N = np.zeros(count)
    for node in range(count):
        row_N = np.where(np.isnan(rtt_ms_NN[node]), np.inf, rtt_ms_NN[node])
        row_N[node] = np.inf
        near_K = np.argpartition(row_N, min(_NEAREST, count) - 1)[:_NEAREST]
        near_K = near_K[np.isfinite(row_N[near_K])]
        first, second = np.triu_indices(len(near_K), 1)
        between = rtt_ms_NN[near_K[first], near_K[second]]
        known = np.isfinite(between)
        if known.any():
            shared = row_N[near_K[first]] + row_N[near_K[second]] - between
            access_N[node] = max(float(np.quantile(shared[known], _LOW_QUANTILE)) / 2, 0.0)
    return access_N


def persistent_branches(
    tree: MergeTree,
    *,
    min_height: float,
    min_persistence: float = MIN_PERSISTENCE,
    min_leaves: int = 2,
) -> Iterator[Ints]:
    """The nodes of each branch of `min_leaves` that persists, children before parents.

    A branch persists if it joins the next one at `min_height` or above, and at `min_persistence`
    times the height at which its own nodes had joined (which counts as half of `min_height` or
    more: below that, heights are noise). What joins nothing persists.
    """
    count = len(tree)
    first = np.empty(count, dtype=np.int64)
    first[tree.order_N] = np.arange(count)
    starts, sizes = first.tolist(), [1] * count
    heights = [0.0] * count + tree.height_M.tolist()
    joined_at = [np.inf] * (count + len(tree.child_M2))
    for (one, other), height in zip(tree.child_M2.tolist(), tree.height_M.tolist(), strict=True):
        starts.append(min(starts[one], starts[other]))
        sizes.append(sizes[one] + sizes[other])
        joined_at[one] = joined_at[other] = height
    for start, size, height, until in zip(starts, sizes, heights, joined_at, strict=True):
        since = max(height, min_height / 2)
        if size >= min_leaves and until >= max(min_height, min_persistence * since):
            yield tree.order_N[start : start + size]


def declared_domains(addresses: Iterable[str], operator: str | None) -> frozenset[DeclaredDomain]:
    """The domains that a node's multiaddresses and its operator's name put it in.

    A subnet is a /24, in IPv6 a /48. Of a node with public addresses only these count: private ones
    are the same in many homes. Addresses of relays, and those that only this machine or link knows,
    do not count.
    """
    found = {ip for address in addresses if (ip := _parse_ip(address)) is not None}
    domains: set[DeclaredDomain] = set() if operator is None else {("operator", operator)}
    for ip in {each for each in found if each.is_global} or found:
        subnet = ip_network((ip, 24 if ip.version == 4 else 48), strict=False)
        domains |= {("machine", str(ip)), ("subnet", str(subnet))}
    return frozenset(domains)


def _declared_groups(nodes: Iterable[NodeState]) -> Iterator[tuple[DomainKind, frozenset[PeerId]]]:
    """Nodes of each declared domain, the largest groups first, of equal ones the machine."""
    groups: dict[DeclaredDomain, set[PeerId]] = defaultdict(set)
    for node in nodes:
        for domain in declared_domains(node.addresses, node.operator):
            groups[domain].add(node.peer_id)
    largest = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    for (kind, _), peers in largest[:_MAX_DECLARED_DOMAINS]:
        yield kind, frozenset(peers)


def _parse_ip(address: str) -> IPv4Address | IPv6Address | None:
    """The node's own address in a multiaddr; None if there is none, or one of its machine only."""
    match = _IP.match(address)
    if match is None or _RELAYED in address:
        return None
    try:
        ip = ip_address(match[1])
    except ValueError:
        return None
    is_local = ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast
    return None if is_local else ip
