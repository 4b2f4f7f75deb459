"""Settings of each command, as one typed, frozen model.

`load_config` merges four sources; the first that has a key wins: command line, `NESA_*`
environment, TOML file, defaults. One file or environment can serve every command::

    SharedConfig        how to find the swarm, how to log
    ├── AccessConfig    `keys`; base of the settings of HTTP servers
    │   └── DashboardConfig `dashboard`
    ├── ClientConfig    `status`, `doctor`, `eval`
    │   ├── AnswerConfig    `generate`, `chat`
    │   └── GatewayConfig   `api`
    ├── PoolClientConfig    `swarm`, `adapters`
    └── PeerConfig      `bootstrap`
        └── OrchestratorConfig  `orchestrate`
            └── NodeConfig      `run`

`cli/flags.py` makes the flags of a command from the fields that `setting` declares.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nesa_node.core.settings.choices import (
    AttestationSource,
    AuditorChoice,
    AuditScheme,
    CacheDtype,
    ClientQuantType,
    DtypeName,
    LogFormat,
    LogLevel,
    PlacementGoal,
    Precision,
    RedundancyName,
    RouteName,
    SamplingDefaults,
    StrategyName,
)
from nesa_node.core.settings.declaration import (
    AnnouncedAddresses,
    ApiKeyText,
    AuditRate,
    BlockCount,
    BlockRange,
    CollectorUrl,
    DeviceName,
    FamilyNames,
    FilePath,
    FolderPaths,
    Gibibytes,
    HostNames,
    Hours,
    HttpAddressText,
    ListenAddresses,
    Location,
    ModelName,
    ModelNames,
    ModelPatterns,
    Networks,
    NonNegativeGibibytes,
    NonNegativeInt,
    Origins,
    OwnBlocks,
    PeerAddresses,
    PeerIds,
    PositiveInt,
    PrivateMode,
    PublicName,
    QuantName,
    QuantTypes,
    Seconds,
    Secret,
    Share,
    ValueFormat,
    check_loopback,
    default_cache_dir,
    default_decisions_path,
    default_identity_path,
    default_keys_path,
    default_snapshots_dir,
    setting,
)
from nesa_node.core.settings.noise_spec import NoiseSpec

MAX_RECORD_TTL_S = 600.0
"""Longest lifetime of a DHT record, in seconds: members of the DHT refuse longer ones."""


def _log_level(default: LogLevel) -> Any:
    return setting(default, "Output", "", basic=True, default_text="info for daemons, else warning")


def _identity_path(text: str) -> Any:
    return setting(
        default_identity_path, "Swarm", text, default_text="~/.config/nesa-node/identity.key"
    )


class SharedConfig(BaseModel):
    """Settings of every command: how to find the swarm, where to compute, what to log."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=True
    )
    trace_service: ClassVar[str] = "nesa-node"
    file_help: ClassVar[str] = "TOML file with any of these settings."

    initial_peers: PeerAddresses = setting(
        (),
        "Swarm",
        "Members of the swarm: HOST:PORT or /ip4/IP/tcp/PORT/p2p/ID ... [default for clients: a "
        "node of this machine, or the last swarm used]",
        basic=True,
    )
    swarm_key: Secret | None = setting(
        None, "Swarm", "Secret of a private swarm; @PATH reads it from a file.", basic=True
    )
    step_timeout_s: Seconds = setting(30, "Limits", "Longest wait for one step.")
    torch_dtype: DtypeName = setting(
        "auto", "Model and device", "Data type to compute in.", basic=True, alias="--dtype"
    )
    device: DeviceName = setting(
        "auto", "Model and device", "auto, cpu, cuda or cuda:N.", basic=True
    )
    threads: Annotated[PositiveInt, Field(le=1024)] | None = setting(
        None,
        "Model and device",
        "CPU threads for tensor work.",
        basic=True,
        default_text="what is fastest",
    )
    revision: Annotated[str, ValueFormat("REVISION")] | None = setting(
        None, "Model and device", "Branch, tag or commit of a hub model."
    )
    token: Secret | None = setting(
        None, "Model and device", "Hub token for gated models; @PATH reads it. [HF_TOKEN]"
    )
    cache_dir: FilePath = setting(
        default_cache_dir,
        "Model and device",
        "Folder for downloads.",
        default_text="~/.cache/nesa-node",
    )
    log_level: LogLevel = _log_level("info")
    log_format: LogFormat = setting("console", "Output", "")
    otel_endpoint: CollectorUrl | None = setting(
        None, "Output", "Send traces to this OpenTelemetry collector: http://127.0.0.1:4318."
    )


class MetricsConfig(SharedConfig):
    """Settings of commands that export Prometheus metrics."""

    metrics: HttpAddressText | None = setting(
        None,
        "Output",
        "Serve Prometheus metrics there, under /metrics: 127.0.0.1:9400.",
        default_text="nowhere",
    )
    metrics_beyond_loopback: bool = setting(
        False,
        "Output",
        "Allow --metrics at an address that other machines can read without a key.",
    )

    @model_validator(mode="after")
    def _check_metrics_address(self) -> Self:
        check_loopback(
            "metrics", self.metrics, "127.0.0.1:9400", allowed=self.metrics_beyond_loopback
        )
        return self


class AccessConfig(SharedConfig):
    """Access control of HTTP servers: keys, rate limits, host names, origins, proxies."""

    api_key: ApiKeyText | None = setting(
        None, "Access", "API key to accept; @PATH reads it from a file.", basic=True
    )
    keys_path: FilePath = setting(
        default_keys_path,
        "Access",
        "File of `nesa-node keys`.",
        default_text="~/.local/state/nesa-node/keys.json",
    )
    allow_open: bool = setting(
        False, "Access", "Serve all clients that can reach the address, without a key."
    )
    requests_per_minute: PositiveInt | None = setting(
        None, "Access", "Limit of requests for keys without their own.", default_text="none"
    )
    tokens_per_minute: PositiveInt | None = setting(
        None, "Access", "The same for tokens of prompts and answers."
    )
    concurrent_requests: PositiveInt | None = setting(
        None, "Access", "The same for concurrent requests."
    )
    max_request_bytes: PositiveInt = setting(8 * 2**20, "Access", "Largest body.")
    cors_origins: Origins = setting(
        (),
        "Access",
        "Allow requests of pages of this origin (https://app.example.org); may be repeated.",
    )
    host_names: HostNames = setting(
        (), "Access", "Accept this host name, too: a LAN's or a proxy's; may be repeated."
    )
    trusted_proxies: Networks = setting(
        (),
        "Access",
        "Trust X-Forwarded-For and -Proto of this IP address or network; may be repeated.",
    )


DEFAULT_AUDIT_RATE = 0.01


class RouteConfig(SharedConfig):
    """How a client's requests travel."""

    route: RouteName = setting(
        "chain",
        "Swarm",
        "chain: nodes push to each other; star: all data passes this client.",
        basic=True,
    )


class PrivacyConfig(SharedConfig):
    """How hidden states are kept from nodes, of nodes and clients."""

    private: PrivateMode = setting(
        "none",
        "Access",
        "Keep text from nodes: they multiply their weights with vectors that only the client can "
        "read, and clients compute all else. Vectors are encrypted (ckks: seconds for each token), "
        "or hidden by random numbers (masks: faster from --stock, and far more traffic). A node "
        "serves such sessions, too; a client has no others. noise:EPS,DELTA,CLIP is of clients "
        "only, and keeps little, less with each request that sends the same text again: "
        "docs/privacy.md.",
    )


class ClientConfig(RouteConfig, PrivacyConfig):
    """Settings of clients, which use a swarm without serving blocks."""

    trace_service = "nesa-client"

    model: ModelName | None = None
    replicate_cache: bool = setting(
        False, "Swarm", "Replicate each node's KV cache on a second node, for fast failover."
    )
    quality: Annotated[str, ValueFormat("QUALITY")] = setting(
        "exact",
        "Swarm",
        "What compression may lose on slow links: exact, high, balanced, or a codec's name for "
        "all links.",
        basic=True,
    )
    min_precision: Precision = setting(
        "nf4",
        "Swarm",
        "The coarsest weights that nodes may compute with: nf4, int8 or full. With full, KV caches "
        "in 8 bits are not used either.",
    )
    strategy: StrategyName = setting("exact-latency", "Swarm", "How nodes are chosen.")
    audit: AuditRate = setting(
        DEFAULT_AUDIT_RATE,
        "Swarm",
        "Share of a session's nodes whose work is computed again: 5%, or 0 for none; newcomers' is "
        "ten times as large.",
        default_text="1%",
    )
    auditors: AuditorChoice = setting(
        "auto",
        "Swarm",
        "What computes it again. client: this machine, if it has the weights; nodes: other nodes, "
        "which see the hidden states; auto: the first that can, but no nodes with --route star.",
    )
    require_attestation: FilePath | None = setting(
        None,
        "Swarm",
        "Use only nodes whose hardware proves what this policy demands (POLICY.json or .toml): "
        "docs/verification.md.",
        default_text="any nodes",
    )
    audit_scheme: AuditScheme = setting(
        "relative-l2",
        "Swarm",
        "How outputs are compared. relative-l2: all values; the other ones compare sketches, which "
        "see less.",
    )
    verify: RedundancyName = setting(
        "none",
        "Swarm",
        "Have three nodes compute each block, in a star, and believe two that agree (2of3), or "
        "none unless all do (paper); or three whole chains, and believe two whose next-token "
        "distributions agree (cdv). Three times the work.",
    )
    keep_session: FilePath | None = setting(
        None,
        "Swarm",
        "Folder for what audited nodes got and gave in each session, for `nesa-node verify`.",
    )
    publish_evidence: bool = setting(
        False,
        "Swarm",
        "Show the hidden states of work that an audit found wrong to up to three nodes with the "
        "same blocks, which check them and tell the swarm.",
    )
    reuse_prefix: bool = setting(
        True, "Swarm", "Reuse cached prefixes of earlier prompts on nodes."
    )
    draft: Annotated[str, ValueFormat("DRAFT")] = setting(
        "off",
        "Swarm",
        "Verify several drafted tokens in one step, where that pays. lookup: drafts are what "
        "followed the last tokens earlier in the text; a folder or name: also those of this small "
        "model with the same vocabulary; auto: also of the folder `draft` in the model's, if it is "
        "there; off: one token a step. Tokens are the same (docs/speculation.md).",
        basic=True,
    )
    client_quant_type: ClientQuantType = setting(
        "none",
        "Model and device",
        "Hold embedding, head and --client-blocks in 8 or 4.5 bits, which is faster and less "
        "exact: none, int8 or nf4 (docs/evaluation.md).",
    )
    client_blocks: OwnBlocks | None = setting(
        None,
        "Model and device",
        "So many first and last blocks are computed here, not by nodes: 2,2.",
        default_text="none",
    )
    deployment: FilePath | None = setting(
        None,
        "Swarm",
        "Use the members of the private deployment with this file (`nesa-node deploy`), and no "
        "swarm.",
        default_text="none",
    )
    private_blocks: BlockRange | None = setting(
        None,
        "Model and device",
        "With --private, the blocks that nodes multiply with, half-open: a:b; all else is computed "
        "here.",
        default_text="all",
    )
    stock: NonNegativeInt = setting(
        16,
        "Model and device",
        "With --private masks, for how many tokens masks are kept, made while nothing is asked.",
    )
    # Events at level info would appear between the words of a streamed answer.
    log_level: LogLevel = _log_level("warning")

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        if self.private_blocks is not None and self.private == "none":
            raise ValueError("private_blocks are those of private sessions: give private, too")
        if self.private_blocks is not None and self.client_blocks is not None:
            raise ValueError("private_blocks and client_blocks say the same: give one of them")
        return self


class AnswerConfig(ClientConfig):
    """Settings of commands that answer prompts."""

    file_help = "TOML file with any of these settings, except those of prompts and sampling."

    adapter: Annotated[str, ValueFormat("NAME")] | None = setting(
        None,
        "Swarm",
        "Published adapter to answer with: NAME or AUTHOR/NAME (`nesa-node adapters list`).",
        basic=True,
    )


class DashboardConfig(AccessConfig):
    """Settings of the dashboard, a web page that shows a swarm."""

    listen: HttpAddressText = setting(
        "127.0.0.1:8080", "Access", "Address of the page.", basic=True
    )
    look_every_s: Seconds = setting(2.5, "Output", "Seconds between two queries of the swarm.")
    max_viewers: Annotated[PositiveInt, Field(le=1000)] = setting(
        16, "Limits", "Most pages open at once."
    )
    trainings: FolderPaths = setting(
        (),
        "Output",
        "Output folder of a `nesa-node finetune`: show its loss curve; may be repeated.",
    )


def _ready_file() -> Any:
    return setting(None, "Output", "Write a JSON file there once it serves.")


class GatewayConfig(ClientConfig, AccessConfig, MetricsConfig):
    """Settings of a gateway: a client that serves OpenAI's API over HTTP."""

    trace_service = "nesa-gateway"

    models: ModelNames = ()
    networks: ModelNames = setting(
        (),
        "Swarm",
        "Networks in pieces that are offered, too, for pictures, transcriptions and embeddings: a "
        "folder, or a model's name on the hub; may be repeated.",
    )
    listen: HttpAddressText = setting("127.0.0.1:8000", "Access", "Where to serve.", basic=True)
    # Linux' default hard limit of open files of one process is 1,048,576 (fs.nr_open).
    max_connections: Annotated[PositiveInt, Field(le=1_000_000)] = setting(
        1024, "Limits", "Clients connected at once."
    )
    max_new_tokens: PositiveInt | None = setting(
        None,
        "Limits",
        "Most tokens of an answer.",
        basic=True,
        default_text="what the context holds",
    )
    default_new_tokens: PositiveInt = setting(
        4096,
        "Limits",
        "Most tokens of an answer if its request has no limit.",
        default_text="4096, or what the context holds",
    )
    discovered_disk_gib: Gibibytes = setting(
        20,
        "Limits",
        "Disk for models that are found without --model, in GiB; the least recently used are "
        "deleted.",
    )
    build_on_demand: ModelPatterns = setting(
        (),
        "Pool",
        "Have the pool build what a request names and no node serves, if such a pattern fits: "
        "ORG/*; may be repeated.",
    )
    identity_path: FilePath = _identity_path("Key file that signs requests to the pool.")
    generation_config: SamplingDefaults = setting(
        "model",
        "Sampling",
        "Sampling defaults of requests: those of the model's generation_config.json, or OpenAI's "
        "temperature of 1.",
    )
    keepalive_s: Seconds = setting(
        10,
        "Limits",
        "Seconds between comments in an idle event stream. After 2 s a comment says what the "
        "request waits for, and again when that changes.",
    )
    grace_s: Seconds = setting(5, "Limits", "Seconds to finish running answers on shutdown.")
    ready_file: FilePath | None = _ready_file()
    log_level: LogLevel = _log_level("info")

    @property
    def offered_models(self) -> tuple[str, ...]:
        """Folders and names of the offered models; empty: all of the swarm that open here."""
        return self.models or (() if self.model is None else (self.model,))


class PeerConfig(MetricsConfig):
    """Settings of a DHT member: reachable, with an identity that is kept across restarts."""

    trace_service = "nesa-bootstrap"

    identity_path: FilePath = _identity_path("Key file of this node.")
    host_maddrs: ListenAddresses = setting(
        ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"), "Swarm", "Where to listen.", basic=True
    )
    announce_maddrs: AnnouncedAddresses = setting(
        (), "Swarm", "Addresses to announce, if peers cannot dial those listened at (NAT)."
    )
    public_name: PublicName | None = setting(
        None, "Swarm", "Name to show in the swarm's table.", basic=True
    )
    operator: PublicName | None = setting(
        None,
        "Swarm",
        "Name of this machine's operator. One operator's machines are expected to fail together: "
        "planners spread the holders of each block over several.",
    )
    ready_file: FilePath | None = _ready_file()
    nat_port_map: bool = setting(False, "Swarm", "Ask the router for a port by UPnP.")
    auto_nat: bool = setting(
        False, "Swarm", "Find out whether peers can dial this one, and traverse NATs."
    )
    relay: bool = setting(False, "Swarm", "Be reachable through relays.")
    allow_peers: PeerIds = setting((), "Limits", "Serve only this peer id; may be repeated.")
    deny_peers: PeerIds = setting((), "Limits", "Never serve this peer id; may be repeated.")
    join_timeout_s: Seconds = setting(
        60, "Swarm", "Seconds to wait for initial peers that do not run yet."
    )
    record_ttl_s: Annotated[Seconds, Field(ge=1, le=MAX_RECORD_TTL_S)] = setting(
        60, "Limits", "Seconds until a crashed node is forgotten."
    )


class PoolClientConfig(SharedConfig):
    """Settings of `swarm`, which asks for swarms of a pool's machines, and of `adapters`."""

    identity_path: FilePath = _identity_path("Key file that signs requests and adapters.")
    log_level: LogLevel = _log_level("warning")


class TaskConfig(RouteConfig):
    """Settings of `task`, which uses a network that nodes serve in pieces."""

    log_level: LogLevel = _log_level("warning")


class OrchestratorConfig(PeerConfig):
    """Settings of an orchestrator, which plans the placement of a model's blocks."""

    trace_service = "nesa-orchestrator"

    model: ModelName | None = None
    allow_orchestrators: PeerIds = setting(
        (),
        "Orchestration",
        "Follow these peer ids' placements without verifying the gain, and yield the lease only "
        "to them; may be repeated.",
    )
    orchestrate_every_s: Seconds = setting(
        30, "Orchestration", "Seconds between two planning rounds."
    )
    learn_every_s: Annotated[Seconds, Field(ge=60)] = setting(
        3600,
        "Orchestration",
        "Seconds between two studies of the stored snapshots, which tune the greedy rule and "
        "precompute schemas; each takes minutes of a processor.",
    )
    lease_ttl_s: Annotated[Seconds, Field(ge=1, le=120)] = setting(
        60, "Orchestration", "Seconds until the lease of a crashed orchestrator expires."
    )
    placement_goal: PlacementGoal = setting("latency", "Orchestration", "latency or throughput.")
    replicas: Annotated[PositiveInt, Field(le=1000)] = setting(
        2, "Orchestration", "Replicas wanted of every block.", basic=True
    )
    allow_creators: PeerIds = setting(
        (),
        "Pool",
        "Build the swarms that these peer ids ask for with `nesa-node swarm create`, beside those "
        "of this machine's own identity; may be repeated.",
    )
    decisions_path: FilePath = setting(
        default_decisions_path,
        "Orchestration",
        "File of decisions and their reasons, for `nesa-node explain`.",
        default_text="~/.local/state/nesa-node/decisions.db",
    )
    snapshots_dir: FilePath = setting(
        default_snapshots_dir,
        "Orchestration",
        "Folder for the swarm's snapshots, for `nesa-node simulate --replay FILE`.",
        default_text="~/.local/state/nesa-node/snapshots",
    )
    http: HttpAddressText | None = setting(
        None,
        "Orchestration",
        "Serve a page about the swarm there: 127.0.0.1:8080.",
        basic=True,
        default_text="nowhere",
    )
    http_beyond_loopback: bool = setting(
        False,
        "Orchestration",
        "Allow --http at an address that other machines can read without a key.",
    )

    @model_validator(mode="after")
    def _check_page_address(self) -> Self:
        check_loopback("http", self.http, "127.0.0.1:8080", allowed=self.http_beyond_loopback)
        return self


class NodeConfig(OrchestratorConfig, PrivacyConfig):
    """Settings of a node: a daemon that serves a span of one model, offers its machine, or holds
    shards of models that it does not know.
    """

    trace_service = "nesa-node"

    model: Annotated[ModelName, Field(min_length=1)] | None = None
    api: HttpAddressText | None = setting(
        None,
        "Access",
        "Serve OpenAI's API, too, in a process of its own: --api alone is 127.0.0.1:8000. Its "
        "other settings are those of `nesa-node api`, from the environment or --config.",
        basic=True,
    )
    orchestrator: bool = setting(
        False,
        "Orchestration",
        "Also be a candidate for the orchestrator of this model.",
        basic=True,
    )
    follow_every_s: Seconds = setting(
        15, "Orchestration", "Seconds between two reads of published placements."
    )
    num_blocks: BlockCount | None = setting(
        None,
        "Model and device",
        "Blocks to hold, or auto: as many as fit.",
        basic=True,
        default_text="auto",
    )
    quant_type: QuantName = setting(
        "none",
        "Model and device",
        "Hold weights in 8 or 4.5 bits: none, int8 or nf4. llm_int8, the published LLM.int8(), "
        "has int8's weights and rounds inputs, too, which costs accuracy and time.",
        basic=True,
    )
    cache_dtype: CacheDtype = setting(
        "auto",
        "Model and device",
        "What the KV cache holds: auto, keys and values as they are computed; int8, in 8 bits, for "
        "twice as many tokens of 16-bit models.",
    )
    block_indices: BlockRange | None = setting(
        None, "Model and device", "Exactly these blocks, half-open: a:b.", basic=True
    )
    first_blocks: BlockRange | None = setting(
        None,
        "Model and device",
        "Begin with these blocks; unlike with --block-indices the node may move later.",
    )
    pieces: PositiveInt | None = setting(
        None,
        "Model and device",
        "Serve any network, and not only language models, cut into so many pieces; a block is then "
        "a piece.",
        default_text="8 for other networks, if no node of the swarm has a plan",
    )
    plan: FilePath | None = setting(
        None,
        "Model and device",
        "Serve the pieces of this plan (`nesa-node plan --out FILE`).",
    )
    image_size: PositiveInt | None = setting(
        None,
        "Model and device",
        "With pieces: pixels of an image's sides, for networks that take images of one size.",
        default_text="what the model's config says, or 224",
    )
    weight_memory_gib: Gibibytes | None = setting(
        None,
        "Limits",
        "With pieces: memory for weights, in GiB. What exceeds it is read again for each request.",
        default_text="all weights stay in memory",
    )
    attn_cache_tokens: PositiveInt | None = setting(
        None, "Limits", "Capacity of the KV cache in tokens."
    )
    adapter_memory_gib: NonNegativeGibibytes = setting(
        1, "Limits", "Memory for adapters that sessions use, in GiB; 0 serves none."
    )
    training_gib: NonNegativeGibibytes | None = setting(
        None,
        "Limits",
        "Memory for clients that fine-tune on this node's blocks, in GiB; 0 refuses them.",
        default_text="a quarter of what the cache leaves free",
    )
    max_disk_gib: Gibibytes | None = setting(
        None, "Limits", "Largest download of model files, in GiB."
    )
    evict_downloads: bool = setting(
        False, "Limits", "Delete the least recently used models to stay within --max-disk-gib."
    )
    adapter_store_gib: NonNegativeGibibytes = setting(
        1.0,
        "Limits",
        "Disk for adapters that peers publish for this model, in GiB; the least recently used are "
        "deleted. An author gets a quarter. 0: store none.",
    )
    adapter_authors: PeerIds = setting(
        (),
        "Limits",
        "Store and serve only adapters of this peer id; may be repeated.",
        default_text="all authors",
    )
    pool_models: ModelPatterns = setting(
        ("*",),
        "Pool",
        "Without MODEL: hold only models of such names, as ORG/* or *-8B; may be repeated.",
        basic=True,
    )
    pool_families: FamilyNames = setting(
        (),
        "Pool",
        "Hold only models of these families, by the model_type of their config: llama,qwen2.",
        default_text="all",
    )
    pool_quant_types: QuantTypes = setting(
        ("none", "int8", "nf4"), "Pool", "Quantizations in which to hold them."
    )
    pool_disk_gib: Gibibytes = setting(
        50,
        "Pool",
        "Disk for their downloads, in GiB; the least recently used are deleted.",
        basic=True,
    )
    pool_max_download_gib: Gibibytes | None = setting(
        None,
        "Pool",
        "Largest download of one model's files, in GiB, with what is on disk of them.",
    )
    pool_memory_share: Share = setting(
        0.8, "Pool", "Share of the device's memory that they may take.", basic=True
    )
    pool_gpu_share: Share | None = setting(
        None,
        "Pool",
        "Hold models only while other programs use at most this share of the NVIDIA GPU's time.",
    )
    pool_loads_per_hour: PositiveInt = setting(
        6, "Pool", "Most models to load in any hour, at an orchestrator's request."
    )
    pool_hours: Hours | None = setting(
        None, "Pool", "Hours of the day, local time, in which to hold any: 20-8."
    )
    shards_gib: Gibibytes | None = setting(
        None,
        "Limits",
        "Without MODEL: hold shards that owners of models send (`nesa-node deploy`), in so much "
        "memory, in GiB, and nothing else.",
        default_text="none",
    )
    private_cache_gib: Gibibytes | None = setting(
        None,
        "Limits",
        "Most memory, in GiB, for weights that are multiplied with encrypted vectors: 16 to 24 "
        "bytes for each. What exceeds it is mapped from a file in the cache directory.",
        default_text="what is free",
    )
    attestation: AttestationSource = setting(
        "none",
        "Access",
        "Where quotes of this machine's hardware come from, which clients may ask for: tdx or snp, "
        "a confidential virtual machine's Linux; auto, if it gives any; command; none.",
    )
    attestation_command: Annotated[str, ValueFormat("COMMAND")] | None = setting(
        None,
        "Access",
        "With --attestation command: a program that gets 64 bytes in hexadecimal as its last "
        "argument, and prints quotes over them as JSON.",
    )
    max_sessions_per_peer: PositiveInt = setting(64, "Limits", "")
    max_cache_tokens_per_peer: PositiveInt | None = setting(
        None, "Limits", "", default_text="half of the cache, or one of the longest session"
    )
    trusted_peers: PeerIds = setting(
        (),
        "Limits",
        "Share cached prefixes between sessions of these peer ids; may be repeated.",
        alias="--trust",
    )
    idle_timeout_s: Seconds = setting(600, "Limits", "Seconds until an idle session is closed.")
    drain_timeout_s: Seconds = setting(30, "Limits", "Seconds to finish running steps on shutdown.")
    max_moves_per_hour: NonNegativeInt = setting(
        4, "Limits", "Most moves to another span per hour; none with --block-indices."
    )
    move_pause_s: Seconds = setting(120, "Limits", "Seconds between two moves.")
    rebalance_every_s: Seconds = setting(
        60, "Limits", "Seconds between checks for unserved blocks."
    )
    ping_every_s: Seconds = setting(6, "Swarm", "Seconds between two pings of other nodes.")
    location: Location | None = setting(
        None, "Swarm", "Position of this machine, as LATITUDE,LONGITUDE in degrees."
    )

    @model_validator(mode="after")
    def _check_private(self) -> Self:
        if NoiseSpec.parse(self.private) is not None:
            raise ValueError("private=noise is a client's: leave it out, any node serves it")
        return self

    @model_validator(mode="after")
    def _check_span_choice(self) -> Self:
        given = (self.block_indices, self.first_blocks, self.num_blocks)
        if sum(value is not None for value in given) > 1:
            raise ValueError(
                "num_blocks, first_blocks and block_indices exclude each other: give one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_needs_model(self) -> Self:
        if self.model is None:
            for name in ("block_indices", "first_blocks", "num_blocks", "api", "http"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for a node of one model: give MODEL, too")
            if self.shards_gib is not None and self.cache_dtype != "auto":
                raise ValueError(
                    f"cache_dtype {self.cache_dtype} is for nodes of a model: the caches of shards "
                    "hold what their owners' sessions computed"
                )
        elif self.shards_gib is not None:
            raise ValueError("shards_gib is for a node without a model: leave MODEL out")
        return self

    @model_validator(mode="after")
    def _check_page_needs_orchestrator(self) -> Self:
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
    PoolClientConfig,
)
SECRET_FIELDS = frozenset({"api_key", "token", "swarm_key"})
