"""The flags that commands share. Each is named like the config field it sets.

Values stay text here: `core/config.py` checks them, so that a wrong flag, variable or file key is
told in the same words. `None` means "not given".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict, TypeVar

from cyclopts import Group, Parameter

from nesa_node.core.choices import (
    DtypeName,
    LogFormat,
    LogLevel,
    PlacementGoal,
    Precision,
    QuantType,
    Route,
    StrategyName,
)
from nesa_node.core.errors import ConfigError

if TYPE_CHECKING:
    from nesa_node.core.config import SharedConfig

SWARM = Group("Swarm", sort_key=10)
COMPUTE = Group("Model and device", sort_key=20)
ORCHESTRATION = Group("Orchestration", sort_key=25)
ACCESS = Group("Access", sort_key=27)
LIMITS = Group("Limits", sort_key=30)
SAMPLING = Group("Sampling", sort_key=35)
OUTPUT = Group("Output", sort_key=40)

ModelArgument = Annotated[
    str | None, Parameter(help="A local folder, or the name of a model on the hub.")
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SharedFlags:
    initial_peers: Annotated[
        tuple[str, ...] | None,
        Parameter(
            group=SWARM, negative=(), help="Addresses of swarm members: /ip4/IP/tcp/PORT/p2p/ID ..."
        ),
    ] = None
    swarm_key: Annotated[
        str | None,
        Parameter(group=SWARM, help="Secret of a private swarm; @PATH reads it from a file."),
    ] = None
    step_timeout_s: Annotated[
        str | None, Parameter(group=LIMITS, help="Seconds to wait for one step. [default: 30]")
    ] = None
    torch_dtype: Annotated[
        DtypeName | None,
        Parameter(alias="--dtype", group=COMPUTE, help="Data type to compute in. [default: auto]"),
    ] = None
    device: Annotated[
        str | None, Parameter(group=COMPUTE, help="auto, cpu, cuda or cuda:N. [default: auto]")
    ] = None
    threads: Annotated[
        str | None, Parameter(group=COMPUTE, help="CPU threads for tensor work. [default: all]")
    ] = None
    revision: Annotated[
        str | None, Parameter(group=COMPUTE, help="Branch, tag or commit of a hub model.")
    ] = None
    token: Annotated[
        str | None,
        Parameter(group=COMPUTE, help="Hub token for gated models; @PATH reads it. [HF_TOKEN]"),
    ] = None
    cache_dir: Annotated[
        str | None,
        Parameter(group=COMPUTE, help="Folder for downloads. [default: ~/.cache/nesa-node]"),
    ] = None
    config: Annotated[
        Path | None, Parameter(group=OUTPUT, help="TOML file with any of these settings.")
    ] = None
    log_level: Annotated[
        LogLevel | None, Parameter(group=OUTPUT, help="[default: info for daemons, else warning]")
    ] = None
    log_format: Annotated[LogFormat | None, Parameter(group=OUTPUT, help="[default: console]")] = (
        None
    )
    otel_endpoint: Annotated[
        str | None,
        Parameter(
            group=OUTPUT,
            help="Send traces to this OpenTelemetry collector: http://127.0.0.1:4318.",
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AccessFlags(SharedFlags):
    api_key: Annotated[
        str | None,
        Parameter(group=ACCESS, help="One key that lets in; @PATH reads it from a file."),
    ] = None
    keys_path: Annotated[
        str | None,
        Parameter(
            group=ACCESS,
            help="File of `nesa-node keys`. [default: ~/.local/state/nesa-node/keys.json]",
        ),
    ] = None
    allow_open: Annotated[
        bool | None,
        Parameter(
            group=ACCESS,
            negative=(),
            help="Serve without any key to whoever can reach the address.",
        ),
    ] = None
    requests_per_minute: Annotated[
        str | None,
        Parameter(group=ACCESS, help="Of a key without a limit of its own. [default: any number]"),
    ] = None
    tokens_per_minute: Annotated[
        str | None,
        Parameter(group=ACCESS, help="The same for tokens, of prompts and answers together."),
    ] = None
    concurrent_requests: Annotated[
        str | None, Parameter(group=ACCESS, help="The same for requests at once.")
    ] = None
    max_request_bytes: Annotated[
        str | None, Parameter(group=ACCESS, help="Largest body. [default: 8388608]")
    ] = None
    cors_origins: Annotated[
        tuple[str, ...] | None,
        Parameter(
            group=ACCESS,
            negative=(),
            help="Let pages of this origin (https://app.example.org) ask; may be repeated.",
        ),
    ] = None
    host_names: Annotated[
        tuple[str, ...] | None,
        Parameter(
            group=ACCESS,
            negative=(),
            help="Answer to this name, too: a LAN's or a proxy's; may be repeated.",
        ),
    ] = None
    trusted_proxies: Annotated[
        tuple[str, ...] | None,
        Parameter(
            group=ACCESS,
            negative=(),
            help="Believe X-Forwarded-For and -Proto of this IP address or network; may be "
            "repeated.",
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MetricsFlags(SharedFlags):
    metrics: Annotated[
        str | None,
        Parameter(
            group=OUTPUT,
            help="Tell Prometheus there, under /metrics: 127.0.0.1:9400. [default: nowhere]",
        ),
    ] = None
    metrics_beyond_loopback: Annotated[
        bool | None,
        Parameter(
            group=OUTPUT,
            negative=(),
            help="Let --metrics be an address that others can reach; whoever does may read.",
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClientFlags(SharedFlags):
    route: Annotated[
        Route | None,
        Parameter(
            group=SWARM,
            help="chain: nodes push to each other; star: all data passes here. [default: chain]",
        ),
    ] = None
    replicate_cache: Annotated[
        bool | None,
        Parameter(
            group=SWARM,
            negative=(),
            help="Keep a second node close behind each, to go on at once where one dies.",
        ),
    ] = None
    quality: Annotated[
        str | None,
        Parameter(
            group=SWARM,
            help="What compression may lose on slow links: exact, high, balanced, or a codec's "
            "name for all links. [default: exact]",
        ),
    ] = None
    min_precision: Annotated[
        Precision | None,
        Parameter(
            group=SWARM,
            help="The coarsest weights that nodes may compute with: nf4, int8 or full. "
            "[default: nf4]",
        ),
    ] = None
    strategy: Annotated[
        StrategyName | None,
        Parameter(group=SWARM, help="How nodes are chosen. [default: exact-latency]"),
    ] = None
    reuse_prefix: Annotated[
        bool | None,
        Parameter(
            group=SWARM,
            help="Begin with what nodes still hold of an earlier prompt. [default: yes]",
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GatewayFlags(ClientFlags, AccessFlags, MetricsFlags):
    listen: Annotated[
        str | None, Parameter(group=ACCESS, help="Where to serve. [default: 127.0.0.1:8000]")
    ] = None
    max_connections: Annotated[
        str | None, Parameter(group=LIMITS, help="Clients connected at once. [default: 1024]")
    ] = None
    max_new_tokens: Annotated[
        str | None,
        Parameter(
            group=LIMITS, help="Cut answers after so many tokens. [default: what the context holds]"
        ),
    ] = None
    default_new_tokens: Annotated[
        str | None,
        Parameter(
            group=LIMITS,
            help="Tokens that an answer may have where its request names no number. "
            "[default: 4096, or what the context holds]",
        ),
    ] = None
    keepalive_s: Annotated[
        str | None,
        Parameter(
            group=LIMITS, help="Seconds of silence until a stream gets a comment. [default: 10]"
        ),
    ] = None
    grace_s: Annotated[
        str | None,
        Parameter(group=LIMITS, help="Seconds that running answers get when stopped. [default: 5]"),
    ] = None
    ready_file: Annotated[
        str | None, Parameter(group=OUTPUT, help="Write a JSON file there once it serves.")
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DashboardFlags(AccessFlags):
    listen: Annotated[
        str | None,
        Parameter(group=ACCESS, help="Where browsers find the page. [default: 127.0.0.1:8080]"),
    ] = None
    look_every_s: Annotated[
        str | None,
        Parameter(group=OUTPUT, help="Seconds between two looks at the swarm. [default: 2.5]"),
    ] = None
    max_viewers: Annotated[
        str | None,
        Parameter(group=LIMITS, help="Open pages that are kept up to date. [default: 16]"),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PeerFlags(MetricsFlags):
    identity_path: Annotated[
        str | None,
        Parameter(
            group=SWARM, help="Key file of this node. [default: ~/.config/nesa-node/identity.key]"
        ),
    ] = None
    host_maddrs: Annotated[
        tuple[str, ...] | None,
        Parameter(
            group=SWARM,
            negative=(),
            help="Where to listen. [default: /ip4/0.0.0.0/tcp/0 /ip6/::/tcp/0]",
        ),
    ] = None
    announce_maddrs: Annotated[
        tuple[str, ...] | None,
        Parameter(group=SWARM, negative=(), help="Addresses to tell others, behind a NAT."),
    ] = None
    public_name: Annotated[
        str | None, Parameter(group=SWARM, help="Name to show in the swarm's table.")
    ] = None
    ready_file: Annotated[
        str | None, Parameter(group=OUTPUT, help="Write a JSON file there once it serves.")
    ] = None
    nat_port_map: Annotated[
        bool | None, Parameter(group=SWARM, negative=(), help="Ask the router for a port by UPnP.")
    ] = None
    auto_nat: Annotated[
        bool | None,
        Parameter(
            group=SWARM,
            negative=(),
            help="Learn whether others can dial this peer, and cross NATs.",
        ),
    ] = None
    relay: Annotated[
        bool | None, Parameter(group=SWARM, negative=(), help="Be reachable through relays.")
    ] = None
    allow_peers: Annotated[
        tuple[str, ...] | None,
        Parameter(group=LIMITS, negative=(), help="Serve only this peer id; may be repeated."),
    ] = None
    deny_peers: Annotated[
        tuple[str, ...] | None,
        Parameter(group=LIMITS, negative=(), help="Never serve this peer id; may be repeated."),
    ] = None
    record_ttl_s: Annotated[
        str | None,
        Parameter(group=LIMITS, help="Seconds until a crashed node is forgotten. [default: 60]"),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OrchestratorFlags(PeerFlags):
    allow_orchestrators: Annotated[
        tuple[str, ...] | None,
        Parameter(
            group=ORCHESTRATION,
            negative=(),
            help="Follow these peer ids' placements without finding the gain oneself, and yield "
            "the lease to nobody else; may be repeated.",
        ),
    ] = None
    orchestrate_every_s: Annotated[
        str | None,
        Parameter(
            group=ORCHESTRATION, help="Seconds between two looks at the swarm. [default: 30]"
        ),
    ] = None
    learn_every_s: Annotated[
        str | None,
        Parameter(
            group=ORCHESTRATION,
            help="Seconds between two studies of the stored snapshots, which tune the greedy rule "
            "and precompute schemas; each takes minutes of a processor. [default: 3600]",
        ),
    ] = None
    lease_ttl_s: Annotated[
        str | None,
        Parameter(
            group=ORCHESTRATION,
            help="Seconds until another follows an orchestrator that died. [default: 60]",
        ),
    ] = None
    placement_goal: Annotated[
        PlacementGoal | None,
        Parameter(group=ORCHESTRATION, help="latency or throughput. [default: latency]"),
    ] = None
    replicas: Annotated[
        str | None,
        Parameter(group=ORCHESTRATION, help="Holders wanted for every block. [default: 2]"),
    ] = None
    decisions_path: Annotated[
        str | None,
        Parameter(
            group=ORCHESTRATION,
            help="File of what was decided and why, for `nesa-node explain`. "
            "[default: ~/.local/state/nesa-node/decisions.db]",
        ),
    ] = None
    snapshots_dir: Annotated[
        str | None,
        Parameter(
            group=ORCHESTRATION,
            help="Folder for the swarm's snapshots, for `nesa-node simulate --replay FILE`. "
            "[default: ~/.local/state/nesa-node/snapshots]",
        ),
    ] = None
    http: Annotated[
        str | None,
        Parameter(
            group=ORCHESTRATION,
            help="Serve a page about the swarm there: 127.0.0.1:8080. [default: nowhere]",
        ),
    ] = None
    http_beyond_loopback: Annotated[
        bool | None,
        Parameter(
            group=ORCHESTRATION,
            negative=(),
            help="Let --http be an address that others can reach; whoever does may read.",
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class NodeFlags(OrchestratorFlags):
    api: Annotated[
        str | None,
        Parameter(
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
            help="Stand for the lease of this model's orchestrator, beside serving.",
        ),
    ] = None
    follow_every_s: Annotated[
        str | None,
        Parameter(
            group=ORCHESTRATION, help="Seconds between two looks at placements. [default: 15]"
        ),
    ] = None
    num_blocks: Annotated[
        str | None,
        Parameter(group=COMPUTE, help="Blocks to hold, or auto: as many as fit. [default: auto]"),
    ] = None
    quant_type: Annotated[
        QuantType | None,
        Parameter(
            group=COMPUTE,
            help="Hold weights in 8 or 4.5 bits: none, int8 or nf4. [default: none]",
        ),
    ] = None
    block_indices: Annotated[
        str | None, Parameter(group=COMPUTE, help="Exactly these blocks, half-open: a:b.")
    ] = None
    attn_cache_tokens: Annotated[
        str | None, Parameter(group=LIMITS, help="Tokens that all sessions may keep together.")
    ] = None
    max_disk_gib: Annotated[
        str | None, Parameter(group=LIMITS, help="Largest download of model files, in GiB.")
    ] = None
    max_sessions_per_peer: Annotated[str | None, Parameter(group=LIMITS, help="[default: 64]")] = (
        None
    )
    max_cache_tokens_per_peer: Annotated[
        str | None,
        Parameter(group=LIMITS, help="[default: half of the cache, or one of the longest session]"),
    ] = None
    trusted_peers: Annotated[
        tuple[str, ...] | None,
        Parameter(
            alias="--trust",
            group=LIMITS,
            negative=(),
            help="Let these peer ids share what is cached of their prompts; may be repeated.",
        ),
    ] = None
    idle_timeout_s: Annotated[
        str | None, Parameter(group=LIMITS, help="Seconds until an idle session is closed. [600]")
    ] = None
    drain_timeout_s: Annotated[
        str | None,
        Parameter(group=LIMITS, help="Seconds that running steps get when stopped. [default: 30]"),
    ] = None
    max_moves_per_hour: Annotated[
        str | None,
        Parameter(
            group=LIMITS,
            help="How often it may change its blocks; with --block-indices never. [default: 4]",
        ),
    ] = None
    move_pause_s: Annotated[
        str | None,
        Parameter(group=LIMITS, help="Seconds between two such changes. [default: 120]"),
    ] = None
    rebalance_every_s: Annotated[
        str | None,
        Parameter(
            group=LIMITS, help="Seconds between looks for blocks nobody holds. [default: 60]"
        ),
    ] = None
    ping_every_s: Annotated[
        str | None,
        Parameter(group=SWARM, help="Seconds between two pings of other nodes. [default: 6]"),
    ] = None
    location: Annotated[
        str | None,
        Parameter(group=SWARM, help="Where this machine is, as LATITUDE,LONGITUDE in degrees."),
    ] = None


class SamplingChoice(TypedDict):
    """Arguments of `cli.text.Sampling`."""

    temperature: float | None
    top_p: float | None
    seed: int | None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    temperature: Annotated[
        float | None, Parameter(group=SAMPLING, help="Sample; higher is more varied.")
    ] = None
    top_p: Annotated[
        float | None,
        Parameter(group=SAMPLING, help="Sample from the likeliest tokens of this share."),
    ] = None
    seed: Annotated[int | None, Parameter(group=SAMPLING, help="Make sampling repeatable.")] = None

    def check(self) -> SamplingChoice:
        """Raises `ConfigError` for values out of range."""
        if self.temperature is not None and not 0 < self.temperature <= 100:
            raise ConfigError("--temperature must lie in (0, 100]; leave it away for greedy")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError("--top-p must lie in (0, 1]")
        return {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}


_Config = TypeVar("_Config", bound="SharedConfig")


def configure(cls: type[_Config], flags: SharedFlags | None, **more: object) -> _Config:
    """The command's config from `flags` (and fields given as `more`), environment and file.

    Sets up logging as it says. Raises `ConfigError`.
    """
    from nesa_node.core.config_sources import load_config
    from nesa_node.core.logging import setup_logging

    given: dict[str, object] = dict(more)
    toml_path = None
    if flags is not None:
        given |= {field.name: getattr(flags, field.name) for field in fields(flags)}
        toml_path = flags.config
    given.pop("config", None)
    config = load_config(cls, given, os.environ, toml_path)
    setup_logging(config.log_level, config.log_format)
    if config.otel_endpoint is not None:
        from nesa_node.cli.otel import start_tracing

        service = _SERVICES.get(cls.__name__, "nesa-node")
        start_tracing(config.otel_endpoint, service, getattr(config, "public_name", None))
    return config


DEFAULT_API = "127.0.0.1:8000"
_API_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|localhost|[0-9.]+):[0-9]+")


def fill_api(tokens: Sequence[str]) -> Sequence[str]:
    """Let `--api` stand without an address."""
    filled: list[str] = []
    for token, following in zip(tokens, (*tokens[1:], ""), strict=True):
        filled.append(token)
        if token == "--api" and not _API_ADDRESS.fullmatch(following):
            filled.append(DEFAULT_API)
    return filled


_SERVICES = {
    "ClientConfig": "nesa-client",
    "GatewayConfig": "nesa-gateway",
    "OrchestratorConfig": "nesa-orchestrator",
    "PeerConfig": "nesa-bootstrap",
}
"""What a trace calls a command, by its config."""


_LIST_FLAGS = frozenset({"--initial-peers", "--host-maddrs", "--announce-maddrs"})
_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/")


def spread_addresses(tokens: Iterable[str]) -> Sequence[str]:
    """Let `--initial-peers A B` mean `--initial-peers A --initial-peers B`.

    Only what looks like an address is taken, so that a prompt may follow the list.
    """
    spread: list[str] = []
    current: str | None = None
    count = 0
    for token in tokens:
        if current is not None and _ADDRESS.match(token):
            if count:
                spread.append(current)
            count += 1
        else:
            current, count = (token, 0) if token in _LIST_FLAGS else (None, 0)
        spread.append(token)
    return spread
