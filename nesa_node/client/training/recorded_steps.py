"""What a client records of training steps, to run them again after the loss of a node.

T tokens of a micro-batch's texts, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from nesa_node.engine.training.text_layout import TextLayout


@dataclass(slots=True)
class RecordedPass:
    """A micro-batch that has gone forward, and backward if `grad_TD` is there."""

    layout: TextLayout
    seed: int
    hidden_TD: Tensor
    grad_TD: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.hidden_TD.nbytes + (0 if self.grad_TD is None else self.grad_TD.nbytes)


@dataclass(slots=True)
class RecordedStep:
    """A step's passes, and how it was applied."""

    number: int
    passes: list[RecordedPass] = field(default_factory=list)
    num_forwards: int = 0
    """Micro-batches that went forward, those included that have no part in the step."""
    learning_rate: float = 0.0
    max_norm: float | None = None

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.passes)

    @property
    def num_backwards(self) -> int:
        """Passes that have gone backward: the first ones."""
        return sum(each.grad_TD is not None for each in self.passes)

    def drop_pending(self) -> None:
        """Forget the passes that did not go backward."""
        del self.passes[self.num_backwards :]
