"""Options of a client's connection to the swarm, and what a session needs of its nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, get_args

from nesa_node.compression import tensors
from nesa_node.compression.codecs import EXACT, check_quality
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.settings.choices import (
    AuditorChoice,
    AuditScheme,
    Precision,
    RedundancyName,
    RouteName,
    StrategyName,
)
from nesa_node.core.settings.declaration import (
    default_audits_path,
    default_decisions_path,
    secret_text,
)
from nesa_node.core.settings.models import DEFAULT_AUDIT_RATE, ClientConfig
from nesa_node.core.settings.noise_spec import NoiseSpec, check_private
from nesa_node.swarm.protocol.messages import Prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Connection options. `identity_path=None` creates a new identity for each connection."""

    initial_peers: tuple[str, ...] = ()
    routing: RouteName = "chain"
    swarm_key: str | None = field(default=None, repr=False)
    identity_path: Path | None = None
    step_timeout_s: float = 30.0
    recovery_timeout_s: float = 60.0
    """Seconds to wait for a replacement before the session fails with `MissingBlocksError`. Time in
    which nodes answer that they are busy does not count."""
    queue_timeout_s: float = 600.0
    """Seconds to wait for free cache at busy nodes before the session fails with `BusyError`. By
    default as long as nodes keep an idle session."""

    replicate_cache: bool = False
    """Give each node of a chain a successor with a recent copy of its cache, which takes over at
    once if the node dies. Reserves cache on both."""

    quality: str = EXACT
    """Lower bound of precision for hidden states on the wire: a level (`exact`, `high`,
    `balanced`), within which each link chooses a codec by its speed, or one codec for all links."""

    min_precision: Precision = "nf4"
    """Coarsest quantization of weights and KV caches that nodes may use."""

    strategy: StrategyName = "exact-latency"
    """Rule that chooses chains (`routing/strategies.py`)."""

    audit: float = DEFAULT_AUDIT_RATE
    """Share of hops whose work is computed again, 0 to 1; that of newcomers is ten times as large.
    """

    auditors: AuditorChoice = "auto"
    """What computes work again: "client", "nodes", or "auto", this client where it has the weights,
    else, except in a star, nodes."""

    audit_scheme: AuditScheme = "relative-l2"
    """How an audit compares outputs (`verification/schemes.py`)."""

    verify: RedundancyName = "none"
    """Rule by which several nodes compute each block, in stars, or several chains ("cdv") all
    blocks. Then sessions reuse no prefixes."""

    private: str = "none"
    """How nodes compute without seeing hidden states; "none": they see them, and
    "noise:EPS,DELTA,CLIP" with noise."""

    stock: int = 16
    """With private="masks", for how many tokens masks are kept."""

    audits_path: Path | None = None
    """File that remembers what audits said of each node; None: only for this connection."""

    require_attestation: Path | None = None
    """Policy by which nodes have to attest their hardware before they are used; None: any nodes."""

    keep_session: Path | None = None
    """Folder for the work of audited nodes, to be audited again; None: it is not kept."""

    deployment: Path | None = None
    """File of a private deployment, whose members are used in place of a swarm's nodes."""

    publish_evidence: bool = False
    """Whether nodes that hold the same blocks get the values of wrong work, to check them."""

    decisions_path: Path | None = None
    """Log of the last decisions, for `nesa-node explain`; None: not recorded."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "quality", check_quality(self.quality))
        if self.routing not in ("chain", "star"):
            raise ValueError(f'routing must be "chain" or "star", got {self.routing!r}')
        if self.min_precision not in get_args(Precision):
            raise ConfigError(
                f"unknown precision {self.min_precision!r}: give {', '.join(get_args(Precision))}"
            )
        if self.strategy not in get_args(StrategyName):
            names = ", ".join(get_args(StrategyName))
            raise ConfigError(f"there is no routing strategy {self.strategy!r}: give {names}")
        if self.auditors not in get_args(AuditorChoice):
            names = ", ".join(get_args(AuditorChoice))
            raise ConfigError(f"unknown auditors {self.auditors!r}: give {names}")
        if self.audit_scheme not in get_args(AuditScheme):
            names = ", ".join(get_args(AuditScheme))
            raise ConfigError(f"there is no audit scheme {self.audit_scheme!r}: give {names}")
        if self.verify not in get_args(RedundancyName):
            names = ", ".join(get_args(RedundancyName))
            raise ConfigError(f"unknown verify={self.verify!r}: give {names}")
        check_private(self.private)
        if self.hides_states and self.verify != "none":
            raise ConfigError(
                f"verify={self.verify!r} compares hidden states of nodes, and with "
                f"private={self.private!r} they have none: give one of them"
            )
        if self.deployment is not None:
            others = {
                "private": self.private != "none",
                "verify": self.verify != "none",
                "require_attestation": self.require_attestation is not None,
                "keep_session": self.keep_session is not None,
                "publish_evidence": self.publish_evidence,
            }
            if given := [name for name, is_given in others.items() if is_given]:
                raise ConfigError(
                    "a deployment's members see hidden states, attest nothing, and are checked by "
                    f"its own verifiers: leave out {', '.join(given)}, or deployment"
                )
        if self.hides_states and self.keep_session is not None:
            raise ConfigError(
                f"keep_session is what audits are made of, and private={self.private!r} has none: "
                "give one of them"
            )
        if not 0 <= self.audit <= 1:
            raise ConfigError(f"audit={self.audit}: give a share of sessions from 0 to 1")
        if self.replicate_cache and self.routing == "star":
            raise ValueError(
                "replicate_cache needs routing='chain': a star's nodes must not learn of each other"
            )
        if self.step_timeout_s <= 0 or min(self.recovery_timeout_s, self.queue_timeout_s) < 0:
            raise ValueError(
                "step_timeout_s must be positive, the other timeouts must not be negative"
            )

    @property
    def hides_states(self) -> bool:
        """Whether nodes get something else than hidden states."""
        return self.private != "none" and self.noise is None

    @property
    def noise(self) -> NoiseSpec | None:
        """Noise that is put into hidden states, if any."""
        return NoiseSpec.parse(self.private)

    @classmethod
    def from_settings(cls, config: ClientConfig) -> Self:
        return cls(
            initial_peers=config.initial_peers,
            routing=config.route,
            swarm_key=secret_text(config.swarm_key),
            step_timeout_s=config.step_timeout_s,
            replicate_cache=config.replicate_cache,
            quality=config.quality,
            min_precision=config.min_precision,
            strategy=config.strategy,
            audit=config.audit,
            auditors=config.auditors,
            audit_scheme=config.audit_scheme,
            verify=config.verify,
            private=config.private,
            stock=config.stock,
            audits_path=default_audits_path(),
            require_attestation=config.require_attestation,
            keep_session=config.keep_session,
            publish_evidence=config.publish_evidence,
            deployment=config.deployment,
            decisions_path=default_decisions_path(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """Requirements of one session on its nodes."""

    model_id: ModelId
    span: Span
    rows: int
    max_tokens: int
    hidden_size: int
    dtype: str
    options: ConnectionOptions = field(default_factory=ConnectionOptions)
    prompt_tokens: int = 0
    """Tokens of the prompt over all rows, where known: what the session computes first."""
    num_blocks: int | None = None
    """Blocks of the whole model, if known: records that contradict it are ignored."""
    prefix: Prefix = ()
    """Digests of each row's prompt."""
    adapter: bytes = b""
    """Digest of the adapter that nodes use beside the model; empty: none."""
    allowed_peers: frozenset[PeerId] | None = None
    """Peers that the session may use; None: all."""
    find_name: Callable[[PeerId], ModelId] | None = None
    """The name by which a node knows the blocks at the moment; None: `model_id`. Raises
    `PeerUnreachableError` for a node that has them no more."""

    @property
    def is_chain(self) -> bool:
        """Whether nodes send to each other; otherwise (a star) all send to the client."""
        return self.options.routing == "chain"

    @property
    def compresses(self) -> bool:
        """Whether links may compress hidden states."""
        return self.options.quality not in (EXACT, "none")

    @property
    def numerics_label(self) -> str:
        """Everything besides the tokens that determines a node's inputs, for prefix digests."""
        words = [self.dtype]
        if self.options.quality != EXACT:
            words.append(self.options.quality)
        if self.options.min_precision != "nf4":
            words.append(f"weights {self.options.min_precision}")
        if self.adapter:
            words.append(f"adapter {self.adapter.hex()}")
        return " ".join(words)

    @property
    def output_tokens(self) -> int:
        """Tokens that each row may have beyond its prompt, at least 1."""
        return max(self.max_tokens - self.prompt_tokens // self.rows, 1)

    @property
    def total_tokens(self) -> int:
        return self.rows * self.max_tokens

    @property
    def max_output_bytes(self) -> int:
        return self.total_tokens * self.hidden_size * tensors.DTYPES[self.dtype].itemsize
