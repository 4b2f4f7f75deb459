"""How a client joins the swarm and routes its sessions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from nesa_node.compression.quality import EXACT, check_quality
from nesa_node.core.choices import Precision, StrategyName
from nesa_node.core.config import Route
from nesa_node.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """`identity_path=None` gives the client a new identity each time it connects."""

    initial_peers: tuple[str, ...] = ()
    routing: Route = "chain"
    swarm_key: str | None = field(default=None, repr=False)
    identity_path: Path | None = None
    step_timeout_s: float = 30.0
    recovery_timeout_s: float = 60.0
    """How long a session waits for a replacement before it fails with the missing blocks. Time in
    which nodes answer that they are busy does not count."""
    queue_timeout_s: float = 600.0
    """How long a session waits for room at busy nodes before it fails with `BusyError`. As long as
    nodes let an idle session keep its room, by default."""

    replicate_cache: bool = False
    """Keep a second node with the same blocks close behind each of a chain's nodes, which goes on
    at once when that dies. It takes cache on both."""

    quality: str = EXACT
    """What compression may do to hidden states on their way: a floor (`exact`, `high`, `balanced`),
    above which each link chooses by its speed, or one codec for all links."""

    min_precision: Precision = "nf4"
    """The coarsest that nodes may hold their weights in."""

    strategy: StrategyName = "exact-latency"
    """How chains are chosen (`routing/strategies.py`)."""

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
        if self.replicate_cache and self.routing == "star":
            raise ValueError(
                "replicate_cache needs routing='chain': a star's nodes must not learn of each other"
            )
        if self.step_timeout_s <= 0 or min(self.recovery_timeout_s, self.queue_timeout_s) < 0:
            raise ValueError(
                "step_timeout_s must be positive, the other timeouts must not be negative"
            )
