"""Settings of each command, as one typed, frozen model.

`load_config` merges four sources; the first that has a key wins: command line, `NESA_*`
environment, TOML file, defaults. One file or environment can serve every command::

    SharedConfig        how to find the swarm, how to log
    ├── AccessConfig    `keys`; base of the settings of HTTP servers
    │   └── DashboardConfig `dashboard`
    ├── ClientConfig    `generate`, `chat`, `status`, `doctor`
    │   └── GatewayConfig   `api`
    └── PeerConfig      `bootstrap`
        └── OrchestratorConfig  `orchestrate`
            └── NodeConfig      `run`
"""

from __future__ import annotations

import os
import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    model_validator,
)

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import PeerId
from nesa_node.core.settings.choices import DtypeName as DtypeName
from nesa_node.core.settings.choices import LogFormat as LogFormat
from nesa_node.core.settings.choices import LogLevel as LogLevel
from nesa_node.core.settings.choices import PlacementGoal as PlacementGoal
from nesa_node.core.settings.choices import Precision as Precision
from nesa_node.core.settings.choices import QuantType as QuantType
from nesa_node.core.settings.choices import RouteName as RouteName
from nesa_node.core.settings.choices import SamplingDefaults as SamplingDefaults
from nesa_node.core.settings.choices import StrategyName as StrategyName
from nesa_node.core.settings.http_address import HttpAddress
from nesa_node.core.settings.peer_address import check_dialable, to_multiaddress
from nesa_node.core.settings.user_file import read_limited, user_path
from nesa_node.core.span import Span

MIN_API_KEY_CHARS = 8
MAX_API_KEY_CHARS = 512
_MAX_SECRET_CHARS = 65_536
_HEADER_PATTERN = re.compile(r"[!-~]+")


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/nesa-node`, by default `~/.cache/nesa-node`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or user_path("~/.cache")) / "nesa-node"


def default_decisions_path() -> Path:
    """`$XDG_STATE_HOME/nesa-node/decisions.db`, by default under `~/.local/state`."""
    return _state_dir() / "decisions.db"


def default_snapshots_dir() -> Path:
    """`$XDG_STATE_HOME/nesa-node/snapshots`, by default under `~/.local/state`."""
    return _state_dir() / "snapshots"


def default_keys_path() -> Path:
    """`$XDG_STATE_HOME/nesa-node/keys.json`, by default under `~/.local/state`."""
    return _state_dir() / "keys.json"


def default_known_swarms_dir() -> Path:
    """`$XDG_STATE_HOME/nesa-node/swarms`, by default under `~/.local/state`."""
    return _state_dir() / "swarms"


def _state_dir() -> Path:
    base = Path(os.environ.get("XDG_STATE_HOME") or user_path("~/.local/state"))
    return base / "nesa-node"


def default_identity_path() -> Path:
    """`$XDG_CONFIG_HOME/nesa-node/identity.key`, by default under `~/.config`."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or user_path("~/.config"))
    return base / "nesa-node" / "identity.key"


def _split_list(value: object) -> object:
    """Split a list that an environment variable holds as text, at commas or white space."""
    return value.replace(",", " ").split() if isinstance(value, str) else value


def _read_address(value: object) -> object:
    """Convert `host:port` to a multiaddress; its peer id is looked up on joining the swarm."""
    if not isinstance(value, str):
        return value
    address = to_multiaddress(value)
    check_dialable(address)
    return address


def _read_span(value: object) -> object:
    if isinstance(value, str):
        try:
            return Span.parse(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
    return value


def _read_secret(value: object) -> object:
    """Replace `@PATH` by the content of that file: arguments are visible in process lists.

    Strips white space, such as the line break at a file's end.
    """
    if isinstance(value, str) and value.startswith("@"):
        try:
            value = read_limited(user_path(value[1:]), _MAX_SECRET_CHARS)
        except OSError as error:
            raise ValueError(f"cannot read {value[1:]}: {error.strerror}") from None
        except ConfigError as error:
            raise ValueError(str(error)) from None
    if isinstance(value, str) and not (value := value.strip()):
        raise ValueError("it is empty")
    return value


def _check_api_key(value: SecretStr) -> SecretStr:
    """Check that an HTTP header can carry the key and that it is too long to guess."""
    text = value.get_secret_value()
    if not MIN_API_KEY_CHARS <= len(text) <= MAX_API_KEY_CHARS or not _HEADER_PATTERN.fullmatch(
        text
    ):
        raise ValueError(
            f"it must have {MIN_API_KEY_CHARS} to {MAX_API_KEY_CHARS} printable ASCII characters "
            "and no space"
        )
    return value


def _read_http_address(value: object) -> object:
    if isinstance(value, str):
        try:
            return str(HttpAddress.parse(value))
        except ConfigError as error:
            raise ValueError(str(error)) from None
    return value


def _check_network(value: str) -> str:
    return str(ip_network(value, strict=False))


def _reject_bool(value: object) -> object:
    """Reject booleans where a number is wanted: Python counts `True` as 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def _expand_home(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return user_path(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _read_location(value: object) -> object:
    """Split `52.5,13.4`; a TOML file may also have a list of two numbers."""
    return tuple(value.split(",")) if isinstance(value, str) else value


HOST_NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9-]+)*$"
ORIGIN_PATTERN = r"^[a-z][a-z0-9+.-]*://[^/\s*,]+$"
"""Scheme, host and optional port, as browsers send it; no path, and no `*`."""

Location = tuple[Annotated[float, Field(ge=-90, le=90)], Annotated[float, Field(ge=-180, le=180)]]
HttpAddressText = Annotated[str, BeforeValidator(_read_http_address)]
FilePath = Annotated[Path, BeforeValidator(_expand_home)]
Secret = Annotated[SecretStr, BeforeValidator(_read_secret)]
ApiKeyText = Annotated[Secret, AfterValidator(_check_api_key)]
PositiveInt = Annotated[int, BeforeValidator(_reject_bool), Field(ge=1)]
PositiveFloat = Annotated[float, BeforeValidator(_reject_bool), Field(gt=0, allow_inf_nan=False)]
# Shorter intervals would keep a core busy; Python's threads cannot wait longer than 9.2e9 s.
Seconds = Annotated[
    float, BeforeValidator(_reject_bool), Field(ge=0.01, le=1e9, allow_inf_nan=False)
]
PeerAddress = Annotated[
    str,
    BeforeValidator(_read_address),
    StringConstraints(
        max_length=512,
        pattern=r"^/(ip4|ip6|dns|dns4|dns6)/[^/]+/(tcp/[0-9]{1,5}|(tcp|udp)/[0-9]{1,5}(/.+)?/p2p/[1-9A-HJ-NP-Za-km-z]+)$",
    ),
]
ListenAddress = Annotated[
    str,
    StringConstraints(
        max_length=512, pattern=r"^/(ip4|ip6|dns|dns4|dns6)/[^/]+/(tcp|udp)/[0-9]{1,5}(/.*)?$"
    ),
]
DeviceName = Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")]
PublicName = Annotated[
    str, StringConstraints(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f]+$")
]
CollectorUrl = Annotated[str, StringConstraints(max_length=512, pattern=r"^https?://[^\s/?#]+/?$")]
PeerAddresses = Annotated[tuple[PeerAddress, ...], BeforeValidator(_split_list)]
ListenAddresses = Annotated[tuple[ListenAddress, ...], BeforeValidator(_split_list)]
PeerIds = Annotated[tuple[PeerId, ...], BeforeValidator(_split_list)]
ModelNames = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_split_list)
]
HostNames = Annotated[
    tuple[
        Annotated[str, StringConstraints(to_lower=True, max_length=253, pattern=HOST_NAME_PATTERN)],
        ...,
    ],
    BeforeValidator(_split_list),
]
Origins = Annotated[
    tuple[Annotated[str, StringConstraints(max_length=300, pattern=ORIGIN_PATTERN)], ...],
    BeforeValidator(_split_list),
]
Networks = Annotated[
    tuple[Annotated[str, AfterValidator(_check_network)], ...], BeforeValidator(_split_list)
]

MAX_RECORD_TTL_S = 600.0
"""Longest lifetime of a DHT record, in seconds: members of the DHT refuse longer ones."""

EXPECTED_FORMATS = {
    "model": "a local folder or the name of a model on the hub",
    "initial_peers": "addresses like /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW... or 192.0.2.7:4001",
    "host_maddrs": "addresses like /ip4/0.0.0.0/tcp/4001 (port 0: any free port)",
    "announce_maddrs": "addresses like /ip4/192.0.2.7/tcp/4001",
    "cache_dir": "a path",
    "identity_path": "a path",
    "decisions_path": "a path",
    "snapshots_dir": "a path",
    "keys_path": "a path",
    "host_names": "names like gateway.example.org, without port",
    "cors_origins": "origins like https://app.example.org, with nothing after the host",
    "trusted_proxies": "IP addresses or networks like 10.0.0.0/8",
    "ready_file": "a path",
    "device": "auto, cpu, cuda, cuda:N or mps",
    "num_blocks": 'a whole number of at least 1, or "auto"',
    "block_indices": 'a half-open range like "0:10"',
    "location": 'degrees of latitude and longitude like "52.5,13.4"',
    "otel_endpoint": "an address like http://127.0.0.1:4318",
    "public_name": "1 to 64 printable characters",
}
"""Expected formats, for fields where pydantic's error message would not explain them."""


class SharedConfig(BaseModel):
    """Settings of every command: how to find the swarm, where to compute, what to log."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    initial_peers: PeerAddresses = ()
    swarm_key: Secret | None = None
    cache_dir: FilePath = Field(default_factory=default_cache_dir)
    token: Secret | None = None
    device: DeviceName = "auto"
    torch_dtype: DtypeName = "auto"
    revision: str | None = None
    step_timeout_s: Seconds = 30
    threads: Annotated[PositiveInt, Field(le=1024)] | None = None
    log_format: LogFormat = "console"
    log_level: LogLevel = "info"
    otel_endpoint: CollectorUrl | None = None


class MetricsConfig(SharedConfig):
    """Settings of commands that export Prometheus metrics."""

    metrics: HttpAddressText | None = None
    metrics_beyond_loopback: bool = False

    @model_validator(mode="after")
    def _check_metrics_address(self) -> Self:
        at = self.metrics
        if at is None or HttpAddress.parse(at).is_loopback or self.metrics_beyond_loopback:
            return self
        raise ValueError(
            f"metrics {at} can be reached from other machines, without a password; give a loopback "
            "address such as 127.0.0.1:9400, or set metrics_beyond_loopback"
        )


class AccessConfig(SharedConfig):
    """Access control of HTTP servers: keys, rate limits, host names, origins, proxies."""

    api_key: ApiKeyText | None = None
    keys_path: FilePath = Field(default_factory=default_keys_path)
    allow_open: bool = False
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    concurrent_requests: PositiveInt | None = None
    max_request_bytes: PositiveInt = 8 * 2**20
    cors_origins: Origins = ()
    host_names: HostNames = ()
    trusted_proxies: Networks = ()


class ClientConfig(SharedConfig):
    """Settings of clients, which use a swarm without serving blocks."""

    model: str | None = None
    route: RouteName = "chain"
    replicate_cache: bool = False
    quality: str = "exact"
    min_precision: Precision = "nf4"
    strategy: StrategyName = "exact-latency"
    reuse_prefix: bool = True
    # Events at level info would appear between the words of a streamed answer.
    log_level: LogLevel = "warning"


class DashboardConfig(AccessConfig):
    """Settings of the dashboard, a web page that shows a swarm."""

    listen: HttpAddressText = "127.0.0.1:8080"
    look_every_s: Seconds = 2.5
    max_viewers: Annotated[PositiveInt, Field(le=1000)] = 16


class GatewayConfig(ClientConfig, AccessConfig, MetricsConfig):
    """Settings of a gateway: a client that serves OpenAI's API over HTTP."""

    models: ModelNames = ()
    listen: HttpAddressText = "127.0.0.1:8000"
    # Linux' default hard limit of open files of one process is 1,048,576 (fs.nr_open).
    max_connections: Annotated[PositiveInt, Field(le=1_000_000)] = 1024
    max_new_tokens: PositiveInt | None = None
    default_new_tokens: PositiveInt = 4096
    discovered_disk_gib: PositiveFloat = 20
    generation_config: SamplingDefaults = "model"
    keepalive_s: Seconds = 10
    grace_s: Seconds = 5
    ready_file: FilePath | None = None
    log_level: LogLevel = "info"

    @property
    def offered_models(self) -> tuple[str, ...]:
        """Folders and names of the offered models; empty: all of the swarm that open here."""
        return self.models or (() if self.model is None else (self.model,))


class PeerConfig(MetricsConfig):
    """Settings of a DHT member: reachable, with an identity that is kept across restarts."""

    identity_path: FilePath = Field(default_factory=default_identity_path)
    host_maddrs: ListenAddresses = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
    announce_maddrs: ListenAddresses = ()
    public_name: PublicName | None = None
    ready_file: FilePath | None = None
    nat_port_map: bool = False
    auto_nat: bool = False
    relay: bool = False
    allow_peers: PeerIds = ()
    deny_peers: PeerIds = ()
    record_ttl_s: Annotated[Seconds, Field(ge=1, le=MAX_RECORD_TTL_S)] = 60
    join_timeout_s: Seconds = 60


class OrchestratorConfig(PeerConfig):
    """Settings of an orchestrator, which plans the placement of a model's blocks."""

    model: str | None = None
    allow_orchestrators: PeerIds = ()
    orchestrate_every_s: Seconds = 30
    learn_every_s: Annotated[Seconds, Field(ge=60)] = 3600
    lease_ttl_s: Annotated[Seconds, Field(ge=1, le=120)] = 60
    placement_goal: PlacementGoal = "latency"
    replicas: Annotated[PositiveInt, Field(le=1000)] = 2
    decisions_path: FilePath = Field(default_factory=default_decisions_path)
    snapshots_dir: FilePath = Field(default_factory=default_snapshots_dir)
    http: HttpAddressText | None = None
    http_beyond_loopback: bool = False

    @model_validator(mode="after")
    def _check_page_address(self) -> Self:
        if (
            self.http is None
            or HttpAddress.parse(self.http).is_loopback
            or self.http_beyond_loopback
        ):
            return self
        raise ValueError(
            f"http {self.http} can be reached from other machines, without a password; give a "
            "loopback address such as 127.0.0.1:8080, or set http_beyond_loopback"
        )


class NodeConfig(OrchestratorConfig):
    """Settings of a node: a daemon that serves a span of one model."""

    model: str = Field(min_length=1)
    api: HttpAddressText | None = None
    orchestrator: bool = False
    follow_every_s: Seconds = 15
    num_blocks: PositiveInt | Literal["auto"] | None = None
    quant_type: QuantType = "none"
    block_indices: Annotated[Span, BeforeValidator(_read_span)] | None = None
    attn_cache_tokens: PositiveInt | None = None
    max_disk_gib: PositiveFloat | None = None
    max_sessions_per_peer: PositiveInt = 64
    max_cache_tokens_per_peer: PositiveInt | None = None
    trusted_peers: PeerIds = ()
    idle_timeout_s: Seconds = 600
    drain_timeout_s: Seconds = 30
    max_moves_per_hour: Annotated[int, BeforeValidator(_reject_bool), Field(ge=0)] = 4
    move_pause_s: Seconds = 120
    rebalance_every_s: Seconds = 60
    ping_every_s: Seconds = 6
    location: Annotated[Location, BeforeValidator(_read_location)] | None = None

    @model_validator(mode="after")
    def _check_span_choice(self) -> NodeConfig:
        if self.block_indices is not None and self.num_blocks is not None:
            raise ValueError("num_blocks and block_indices exclude each other: give one of them")
        return self

    @model_validator(mode="after")
    def _check_page_needs_orchestrator(self) -> NodeConfig:
        if self.http is not None and not self.orchestrator:
            raise ValueError("http shows what an orchestrator sees: give orchestrator, too")
        return self


ALL_CONFIGS: tuple[type[SharedConfig], ...] = (
    NodeConfig,
    OrchestratorConfig,
    PeerConfig,
    DashboardConfig,
    GatewayConfig,
    ClientConfig,
    AccessConfig,
)
SECRET_FIELDS = frozenset({"api_key", "token", "swarm_key"})


def secret_text(value: SecretStr | None) -> str | None:
    """The secret as plain text."""
    return None if value is None else value.get_secret_value()
