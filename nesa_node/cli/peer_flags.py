"""Flags of DHT members (bootstrap peers, orchestrators, nodes), declared as in `flags.py`."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from nesa_node.cli.flags import ACCESS, COMPUTE, LIMITS, ORCHESTRATION, OUTPUT, SWARM, MetricsFlags
from nesa_node.core.settings.choices import PlacementGoal, QuantType


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PeerFlags(MetricsFlags):
    identity_path: Annotated[
        str | None,
        Parameter(
            metavar="PATH",
            group=SWARM,
            help="Key file of this node. [default: ~/.config/nesa-node/identity.key]",
        ),
    ] = None
    host_maddrs: Annotated[
        tuple[str, ...] | None,
        Parameter(
            metavar="ADDRESS",
            group=SWARM,
            negative=(),
            help="Where to listen. [default: /ip4/0.0.0.0/tcp/0 /ip6/::/tcp/0]",
        ),
    ] = None
    announce_maddrs: Annotated[
        tuple[str, ...] | None,
        Parameter(
            metavar="ADDRESS",
            group=SWARM,
            negative=(),
            help="Addresses to announce, if peers cannot dial those listened at (NAT).",
        ),
    ] = None
    public_name: Annotated[
        str | None,
        Parameter(metavar="NAME", group=SWARM, help="Name to show in the swarm's table."),
    ] = None
    ready_file: Annotated[
        str | None,
        Parameter(metavar="PATH", group=OUTPUT, help="Write a JSON file there once it serves."),
    ] = None
    nat_port_map: Annotated[
        bool | None, Parameter(group=SWARM, negative=(), help="Ask the router for a port by UPnP.")
    ] = None
    auto_nat: Annotated[
        bool | None,
        Parameter(
            group=SWARM,
            negative=(),
            help="Find out whether peers can dial this one, and traverse NATs.",
        ),
    ] = None
    relay: Annotated[
        bool | None, Parameter(group=SWARM, negative=(), help="Be reachable through relays.")
    ] = None
    allow_peers: Annotated[
        tuple[str, ...] | None,
        Parameter(
            metavar="PEER",
            group=LIMITS,
            negative=(),
            help="Serve only this peer id; may be repeated.",
        ),
    ] = None
    deny_peers: Annotated[
        tuple[str, ...] | None,
        Parameter(
            metavar="PEER",
            group=LIMITS,
            negative=(),
            help="Never serve this peer id; may be repeated.",
        ),
    ] = None
    join_timeout_s: Annotated[
        str | None,
        Parameter(
            metavar="SECONDS",
            group=SWARM,
            help="Seconds to wait for initial peers that do not run yet. [default: 60]",
        ),
    ] = None
    record_ttl_s: Annotated[
        str | None,
        Parameter(
            metavar="SECONDS",
            group=LIMITS,
            help="Seconds until a crashed node is forgotten. [default: 60]",
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OrchestratorFlags(PeerFlags):
    allow_orchestrators: Annotated[
        tuple[str, ...] | None,
        Parameter(
            metavar="PEER",
            group=ORCHESTRATION,
            negative=(),
            help="Follow these peer ids' placements without verifying the gain, and yield the "
            "lease only to them; may be repeated.",
        ),
    ] = None
    orchestrate_every_s: Annotated[
        str | None,
        Parameter(
            metavar="SECONDS",
            group=ORCHESTRATION,
            help="Seconds between two planning rounds. [default: 30]",
        ),
    ] = None
    learn_every_s: Annotated[
        str | None,
        Parameter(
            metavar="SECONDS",
            group=ORCHESTRATION,
            help="Seconds between two studies of the stored snapshots, which tune the greedy rule "
            "and precompute schemas; each takes minutes of a processor. [default: 3600]",
        ),
    ] = None
    lease_ttl_s: Annotated[
        str | None,
        Parameter(
            metavar="SECONDS",
            group=ORCHESTRATION,
            help="Seconds until the lease of a crashed orchestrator expires. [default: 60]",
        ),
    ] = None
    placement_goal: Annotated[
        PlacementGoal | None,
        Parameter(group=ORCHESTRATION, help="latency or throughput. [default: latency]"),
    ] = None
    replicas: Annotated[
        str | None,
        Parameter(
            metavar="INT", group=ORCHESTRATION, help="Replicas wanted of every block. [default: 2]"
        ),
    ] = None
    decisions_path: Annotated[
        str | None,
        Parameter(
            metavar="PATH",
            group=ORCHESTRATION,
            help="File of decisions and their reasons, for `nesa-node explain`. "
            "[default: ~/.local/state/nesa-node/decisions.db]",
        ),
    ] = None
    snapshots_dir: Annotated[
        str | None,
        Parameter(
            metavar="PATH",
            group=ORCHESTRATION,
            help="Folder for the swarm's snapshots, for `nesa-node simulate --replay FILE`. "
            "[default: ~/.local/state/nesa-node/snapshots]",
        ),
    ] = None
    http: Annotated[
        str | None,
        Parameter(
            metavar="HOST:PORT",
            group=ORCHESTRATION,
            help="Serve a page about the swarm there: 127.0.0.1:8080. [default: nowhere]",
        ),
    ] = None
    http_beyond_loopback: Annotated[
        bool | None,
        Parameter(
            group=ORCHESTRATION,
            negative=(),
            help="Allow --http at an address that other machines can read without a key.",
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class NodeFlags(OrchestratorFlags):
    api: Annotated[
        str | None,
        Parameter(
            metavar="HOST:PORT",
            group=ACCESS,
            help="Serve OpenAI's API, too, in a process of its own: --api alone is 127.0.0.1:8000. "
            "Its other settings are those of `nesa-node api`, from the environment or --config.",
        ),
    ] = None
    orchestrator: Annotated[
        bool | None,
        Parameter(
            group=ORCHESTRATION,
            negative=(),
            help="Also be a candidate for the orchestrator of this model.",
        ),
    ] = None
    follow_every_s: Annotated[
        str | None,
        Parameter(
            metavar="SECONDS",
            group=ORCHESTRATION,
            help="Seconds between two reads of published placements. [default: 15]",
        ),
    ] = None
    num_blocks: Annotated[
        str | None,
        Parameter(
            metavar="INT|auto",
            group=COMPUTE,
            help="Blocks to hold, or auto: as many as fit. [default: auto]",
        ),
    ] = None
    quant_type: Annotated[
        QuantType | None,
        Parameter(
            group=COMPUTE,
            help="Hold weights in 8 or 4.5 bits: none, int8 or nf4. [default: none]",
        ),
    ] = None
    block_indices: Annotated[
        str | None,
        Parameter(metavar="A:B", group=COMPUTE, help="Exactly these blocks, half-open: a:b."),
    ] = None
    attn_cache_tokens: Annotated[
        str | None,
        Parameter(metavar="INT", group=LIMITS, help="Capacity of the KV cache in tokens."),
    ] = None
    max_disk_gib: Annotated[
        str | None,
        Parameter(metavar="GIB", group=LIMITS, help="Largest download of model files, in GiB."),
    ] = None
    max_sessions_per_peer: Annotated[
        str | None, Parameter(metavar="INT", group=LIMITS, help="[default: 64]")
    ] = None
    max_cache_tokens_per_peer: Annotated[
        str | None,
        Parameter(
            metavar="INT",
            group=LIMITS,
            help="[default: half of the cache, or one of the longest session]",
        ),
    ] = None
    trusted_peers: Annotated[
        tuple[str, ...] | None,
        Parameter(
            metavar="PEER",
            alias="--trust",
            group=LIMITS,
            negative=(),
            help="Share cached prefixes between sessions of these peer ids; may be repeated.",
        ),
    ] = None
    idle_timeout_s: Annotated[
        str | None,
        Parameter(
            metavar="SECONDS", group=LIMITS, help="Seconds until an idle session is closed. [600]"
        ),
    ] = None
    drain_timeout_s: Annotated[
        str | None,
        Parameter(
            metavar="SECONDS",
            group=LIMITS,
            help="Seconds to finish running steps on shutdown. [default: 30]",
        ),
    ] = None
    max_moves_per_hour: Annotated[
        str | None,
        Parameter(
            metavar="INT",
            group=LIMITS,
            help="Most moves to another span per hour; none with --block-indices. [default: 4]",
        ),
    ] = None
    move_pause_s: Annotated[
        str | None,
        Parameter(
            metavar="SECONDS", group=LIMITS, help="Seconds between two moves. [default: 120]"
        ),
    ] = None
    rebalance_every_s: Annotated[
        str | None,
        Parameter(
            metavar="SECONDS",
            group=LIMITS,
            help="Seconds between checks for unserved blocks. [default: 60]",
        ),
    ] = None
    ping_every_s: Annotated[
        str | None,
        Parameter(
            metavar="SECONDS",
            group=SWARM,
            help="Seconds between two pings of other nodes. [default: 6]",
        ),
    ] = None
    location: Annotated[
        str | None,
        Parameter(
            metavar="LAT,LON",
            group=SWARM,
            help="Position of this machine, as LATITUDE,LONGITUDE in degrees.",
        ),
    ] = None
