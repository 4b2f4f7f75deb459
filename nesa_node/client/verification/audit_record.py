"""What one audit found, as it is logged, kept and shown."""

from __future__ import annotations

from dataclasses import dataclass

from nesa_node.client.verification.audit_history import AuditOutcome
from nesa_node.core.errors import WrongActivationsError
from nesa_node.core.ids import PeerId, Span
from nesa_node.verification.schemes import DEFAULT_SCHEME


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """Outcome of an audit. Errors are those of `scheme`, `of_allowed` the worst of its bounds."""

    peer: PeerId
    """Empty if this is about a chain as a whole, see `chain`."""
    blocks: tuple[int, int]
    outcome: AuditOutcome
    chain: tuple[PeerId, ...] = ()
    """Nodes of a chain that was outvoted: which of them was wrong is not known."""
    auditor: str = "client"
    """Which computed the work again: this client or, by its peer id, a node."""
    drawn_with: float
    """Probability with which this node's work in a session was drawn."""
    tokens: int = 0
    worst: float | None = None
    mean: float | None = None
    quantiles: tuple[float, ...] = ()
    of_allowed: float | None = None
    position: int | None = None
    """First token whose error alone is too large."""
    scheme: str = DEFAULT_SCHEME
    excused: int = 0
    """Tokens that were not judged, since routers may have chosen other experts for them."""
    reason: str = ""

    def to_error(self) -> WrongActivationsError | None:
        """What is wrong with the session's work, if anything is."""
        if self.outcome not in ("failed", "unclear", "disputed"):
            return None
        peer = self.peer if self.outcome == "failed" else None
        what = f"{self.peer} gave {self.describe_fault()}"
        return WrongActivationsError(peer, self.blocks, self.position, what)

    def describe_fault(self) -> str:
        since = "" if self.position is None else f", from token {self.position} on"
        reason = self.reason or f"its errors are {self.of_allowed:.3g} x those allowed"
        return f"wrong activations of blocks {Span(*self.blocks)}{since}: {reason}"
