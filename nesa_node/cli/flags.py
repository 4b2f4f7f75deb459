"""Flags that commands share. Each is named like the config field it sets.

Values stay text here: `core/settings/models.py` validates them, so that errors of flags, variables
and file keys read alike. `None` means "not given". Annotations must not be text (no `from
__future__ import annotations`): the parser would resolve them in a subclass' module.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import Group, Parameter

from nesa_node.core.settings.choices import (
    DtypeName,
    LogFormat,
    LogLevel,
    Precision,
    RouteName,
    SamplingDefaults,
    StrategyName,
)

if TYPE_CHECKING:
    from nesa_node.core.settings.models import SharedConfig

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
            metavar="ADDRESS",
            group=SWARM,
            negative=(),
            help="Members of the swarm: HOST:PORT or /ip4/IP/tcp/PORT/p2p/ID ... [default for "
            "clients: a node of this machine, or the last swarm used]",
        ),
    ] = None
    swarm_key: Annotated[
        str | None,
        Parameter(
            metavar="SECRET",
            group=SWARM,
            help="Secret of a private swarm; @PATH reads it from a file.",
        ),
    ] = None
    step_timeout_s: Annotated[
        str | None,
        Parameter(metavar="SECONDS", group=LIMITS, help="Longest wait for one step. [default: 30]"),
    ] = None
    torch_dtype: Annotated[
        DtypeName | None,
        Parameter(alias="--dtype", group=COMPUTE, help="Data type to compute in. [default: auto]"),
    ] = None
    device: Annotated[
        str | None,
        Parameter(
            metavar="DEVICE", group=COMPUTE, help="auto, cpu, cuda or cuda:N. [default: auto]"
        ),
    ] = None
    threads: Annotated[
        str | None,
        Parameter(
            metavar="INT",
            group=COMPUTE,
            help="CPU threads for tensor work. [default: what is fastest]",
        ),
    ] = None
    revision: Annotated[
        str | None,
        Parameter(metavar="REVISION", group=COMPUTE, help="Branch, tag or commit of a hub model."),
    ] = None
    token: Annotated[
        str | None,
        Parameter(
            metavar="SECRET",
            group=COMPUTE,
            help="Hub token for gated models; @PATH reads it. [HF_TOKEN]",
        ),
    ] = None
    cache_dir: Annotated[
        str | None,
        Parameter(
            metavar="PATH",
            group=COMPUTE,
            help="Folder for downloads. [default: ~/.cache/nesa-node]",
        ),
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
            metavar="URL",
            group=OUTPUT,
            help="Send traces to this OpenTelemetry collector: http://127.0.0.1:4318.",
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AccessFlags(SharedFlags):
    api_key: Annotated[
        str | None,
        Parameter(
            metavar="SECRET", group=ACCESS, help="API key to accept; @PATH reads it from a file."
        ),
    ] = None
    keys_path: Annotated[
        str | None,
        Parameter(
            metavar="PATH",
            group=ACCESS,
            help="File of `nesa-node keys`. [default: ~/.local/state/nesa-node/keys.json]",
        ),
    ] = None
    allow_open: Annotated[
        bool | None,
        Parameter(
            group=ACCESS,
            negative=(),
            help="Serve all clients that can reach the address, without a key.",
        ),
    ] = None
    requests_per_minute: Annotated[
        str | None,
        Parameter(
            metavar="INT",
            group=ACCESS,
            help="Limit of requests for keys without their own. [default: none]",
        ),
    ] = None
    tokens_per_minute: Annotated[
        str | None,
        Parameter(
            metavar="INT",
            group=ACCESS,
            help="The same for tokens of prompts and answers.",
        ),
    ] = None
    concurrent_requests: Annotated[
        str | None,
        Parameter(metavar="INT", group=ACCESS, help="The same for concurrent requests."),
    ] = None
    max_request_bytes: Annotated[
        str | None, Parameter(metavar="INT", group=ACCESS, help="Largest body. [default: 8388608]")
    ] = None
    cors_origins: Annotated[
        tuple[str, ...] | None,
        Parameter(
            metavar="ORIGIN",
            group=ACCESS,
            negative=(),
            help="Allow requests of pages of this origin (https://app.example.org); may be "
            "repeated.",
        ),
    ] = None
    host_names: Annotated[
        tuple[str, ...] | None,
        Parameter(
            metavar="NAME",
            group=ACCESS,
            negative=(),
            help="Accept this host name, too: a LAN's or a proxy's; may be repeated.",
        ),
    ] = None
    trusted_proxies: Annotated[
        tuple[str, ...] | None,
        Parameter(
            metavar="NETWORK",
            group=ACCESS,
            negative=(),
            help="Trust X-Forwarded-For and -Proto of this IP address or network; may be repeated.",
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MetricsFlags(SharedFlags):
    metrics: Annotated[
        str | None,
        Parameter(
            metavar="HOST:PORT",
            group=OUTPUT,
            help="Serve Prometheus metrics there, under /metrics: 127.0.0.1:9400. [default: "
            "nowhere]",
        ),
    ] = None
    metrics_beyond_loopback: Annotated[
        bool | None,
        Parameter(
            group=OUTPUT,
            negative=(),
            help="Allow --metrics at an address that other machines can read without a key.",
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClientFlags(SharedFlags):
    route: Annotated[
        RouteName | None,
        Parameter(
            group=SWARM,
            help="chain: nodes push to each other; star: all data passes this client. [default: "
            "chain]",
        ),
    ] = None
    replicate_cache: Annotated[
        bool | None,
        Parameter(
            group=SWARM,
            negative=(),
            help="Replicate each node's KV cache on a second node, for fast failover.",
        ),
    ] = None
    quality: Annotated[
        str | None,
        Parameter(
            metavar="QUALITY",
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
            help="Reuse cached prefixes of earlier prompts on nodes. [default: yes]",
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GatewayFlags(ClientFlags, AccessFlags, MetricsFlags):
    listen: Annotated[
        str | None,
        Parameter(
            metavar="HOST:PORT", group=ACCESS, help="Where to serve. [default: 127.0.0.1:8000]"
        ),
    ] = None
    max_connections: Annotated[
        str | None,
        Parameter(metavar="INT", group=LIMITS, help="Clients connected at once. [default: 1024]"),
    ] = None
    max_new_tokens: Annotated[
        str | None,
        Parameter(
            metavar="INT",
            group=LIMITS,
            help="Most tokens of an answer. [default: what the context holds]",
        ),
    ] = None
    default_new_tokens: Annotated[
        str | None,
        Parameter(
            metavar="INT",
            group=LIMITS,
            help="Most tokens of an answer if its request has no limit. "
            "[default: 4096, or what the context holds]",
        ),
    ] = None
    discovered_disk_gib: Annotated[
        str | None,
        Parameter(
            metavar="GIB",
            group=LIMITS,
            help="Disk for models that are found without --model, in GiB; the least recently used "
            "are deleted. [default: 20]",
        ),
    ] = None
    generation_config: Annotated[
        SamplingDefaults | None,
        Parameter(
            group=SAMPLING,
            help="Sampling defaults of requests: those of the model's generation_config.json, or "
            "OpenAI's temperature of 1. [default: model]",
        ),
    ] = None
    keepalive_s: Annotated[
        str | None,
        Parameter(
            metavar="SECONDS",
            group=LIMITS,
            help="Seconds between comments in an idle event stream. After 2 s a comment says what "
            "the request waits for, and again when that changes. [default: 10]",
        ),
    ] = None
    grace_s: Annotated[
        str | None,
        Parameter(
            metavar="SECONDS",
            group=LIMITS,
            help="Seconds to finish running answers on shutdown. [default: 5]",
        ),
    ] = None
    ready_file: Annotated[
        str | None,
        Parameter(metavar="PATH", group=OUTPUT, help="Write a JSON file there once it serves."),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DashboardFlags(AccessFlags):
    listen: Annotated[
        str | None,
        Parameter(
            metavar="HOST:PORT",
            group=ACCESS,
            help="Address of the page. [default: 127.0.0.1:8080]",
        ),
    ] = None
    look_every_s: Annotated[
        str | None,
        Parameter(
            metavar="SECONDS",
            group=OUTPUT,
            help="Seconds between two queries of the swarm. [default: 2.5]",
        ),
    ] = None
    max_viewers: Annotated[
        str | None,
        Parameter(metavar="INT", group=LIMITS, help="Most pages open at once. [default: 16]"),
    ] = None


_TRACE_SERVICE_NAMES = {
    "ClientConfig": "nesa-client",
    "GatewayConfig": "nesa-gateway",
    "OrchestratorConfig": "nesa-orchestrator",
    "PeerConfig": "nesa-bootstrap",
}
"""Service names of traces, by the command's config class."""

_Config = TypeVar("_Config", bound="SharedConfig")


def load_command_config(
    cls: type[_Config],
    flags: SharedFlags | None,
    on_ignored: Callable[[str, str], None] | None = None,
    **more: object,
) -> _Config:
    """Load a command's config from `flags`, fields given as `more`, environment and file.

    `on_ignored` is passed to `load_config`. Also sets up logging and tracing. Raises `ConfigError`,
    and `InsufficientMemoryError` if `ulimit -v` is too low.
    """
    from nesa_node.cli.process_limits import check_address_space

    check_address_space()
    from nesa_node.core.logging import setup_logging
    from nesa_node.core.settings.sources import load_config

    given: dict[str, object] = dict(more)
    toml_path = None
    if flags is not None:
        given |= {field.name: getattr(flags, field.name) for field in fields(flags)}
        toml_path = flags.config
    given.pop("config", None)
    config = load_config(cls, given, os.environ, toml_path, on_ignored)
    setup_logging(config.log_level, config.log_format)
    if config.otel_endpoint is not None:
        from nesa_node.cli.services.trace_export import start_tracing

        service = _TRACE_SERVICE_NAMES.get(cls.__name__, "nesa-node")
        start_tracing(config.otel_endpoint, service, getattr(config, "public_name", None))
    return config
