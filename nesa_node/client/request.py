"""Requests and options of routes: what a session needs of its nodes."""

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
    """Requirements of one session on its nodes."""

    model_id: ModelId
    span: Span
    rows: int
    max_tokens: int
    hidden_size: int
    dtype: str
    mode: Mode
    swarm_key: str | None = None
    replicates: bool = False
    """Whether every node gets a successor with a recent copy of its cache."""
    num_blocks: int | None = None
    """Blocks of the whole model, if known: records that contradict it are ignored."""
    prefix: Prefix = ()
    """Digests of each row's prompt."""
    min_precision: Precision = "nf4"
    """Coarsest quantization of weights that nodes may use."""
    quality: str = EXACT
    """Lower bound of precision for hidden states on the wire."""
    only: frozenset[PeerId] | None = None
    """Peers that the session may use; None: all."""

    @property
    def precision(self) -> str:
        """Everything besides the tokens that determines a node's inputs, for prefix digests."""
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
