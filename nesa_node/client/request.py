"""What a session needs of its nodes."""

from __future__ import annotations

from dataclasses import dataclass

from nesa_node.compression import tensors
from nesa_node.compression.quality import EXACT
from nesa_node.core.choices import Precision
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.span import Span
from nesa_node.swarm.messages import Mode, Prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What a session needs of its nodes."""

    model_id: ModelId
    span: Span
    rows: int
    max_tokens: int
    hidden_size: int
    dtype: str
    mode: Mode
    swarm_key: str | None = None
    replicates: bool = False
    """Every node is to have a successor that is close behind it."""
    num_blocks: int | None = None
    """Of the whole model. Where it is given, records that say otherwise count for nothing."""
    prefix: Prefix = ()
    """Digests of what each row will be fed first."""
    min_precision: Precision = "nf4"
    """The coarsest that nodes may hold their weights in."""
    quality: str = EXACT
    """What compression may do to hidden states."""
    only: frozenset[PeerId] | None = None
    """Whom it may use; None: anybody."""

    @property
    def precision(self) -> str:
        """What the hidden states that reach a node depend on beside the tokens."""
        words = [self.dtype]
        if self.quality != EXACT:
            words.append(self.quality)
        if self.min_precision != "nf4":
            words.append(f"weights {self.min_precision}")
        return " ".join(words)

    @property
    def tokens(self) -> int:
        return self.rows * self.max_tokens

    @property
    def max_output_bytes(self) -> int:
        return self.tokens * self.hidden_size * tensors.DTYPES[self.dtype].itemsize
