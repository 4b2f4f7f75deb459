"""Layers of Llama's shape for a few tokens, in machine code but for their products.

What a small step costs beside its weights is operations: each takes torch 5 to 30 microseconds, and
a layer has some thirty of them. Here they are five, and four products (`step_program.py`).

T tokens, D hidden, E head size, P positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from nesa_node.compression.hidden_states import Range
from nesa_node.engine.attention import PackedRuns
from nesa_node.engine.gemv import NAMES
from nesa_node.engine.machine_code import compiled
from nesa_node.engine.step_program import LANES, Buffers, Functions, StepProgram

if TYPE_CHECKING:
    from nesa_node.engine.fused_layers import FusedLayer

MOST_TOKENS = 32
"""For more of them torch's operations on whole tensors cost little, and its attention less."""


MOST_PROGRAMS = 48
"""Each takes up to 10 kB for a layer, and clients choose which parts of a span they use."""


class FewTokens:
    """Runs layers of one shape and dtype, one step at a time."""

    def __init__(self, layers: Iterable[FusedLayer]) -> None:
        """Raises `ValueError` for layers of another shape, or where there is no compiler."""
        [shape, *others] = {_shape(layer) for layer in layers}
        if others or shape is None:
            raise ValueError("these layers' sizes, activation, dtype or device have none")
        dtype, dim, group = shape
        functions = compiled(
            ("add_and_norm", dtype),
            ("rotate", dtype, dim),
            ("attend", dtype, dim, group),
            ("activate", dtype),
        )
        if functions is None:
            raise ValueError("there is no machine code for this processor")
        self._functions = Functions(*functions)
        self._buffers = Buffers(MOST_TOKENS)
        self._programs: dict[tuple[int, int, int, int], StepProgram] = {}
        """The last used comes last."""

    def serves(self, packed: PackedRuns) -> bool:
        """Whether these are few tokens, and the cache of each row lies in one piece."""
        if packed.tokens > MOST_TOKENS:
            return False
        # A loop: `all` takes three times as long.
        for row in packed.rows:  # noqa: SIM110
            if not isinstance(row.slots, slice):
                return False
        return True

    def run(
        self,
        layers: Sequence[FusedLayer],
        inputs: Iterable[Range],
        outputs: Iterable[Range],
        tables: tuple[Tensor, Tensor],
        packed: PackedRuns,
    ) -> None:
        """Read the packed tokens' hidden states, and write the last layer's outputs.

        `tables`: cosines and signed sines [P, 1, E].
        """
        tokens = packed.tokens
        # Parts of a span share this object.
        key = tokens, layers[0].layer_idx, len(layers), torch.get_num_threads()
        program = self._programs.get(key)
        if program is None or not program.fits(tables, packed.pool):
            program = StepProgram(
                self._functions, layers, self._buffers, tokens, tables, packed.pool
            )
        self._programs.pop(key, None)
        self._programs[key] = program
        if len(self._programs) > MOST_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        program.run(inputs, outputs, packed)


def _shape(layer: FusedLayer) -> tuple[str, int, int] | None:
    """A layer's dtype, E and G; None if it has no machine code."""
    weight = layer.before_mlp.weight
    sizes = (len(weight), layer.down.in_features, layer.head_dim // 2)
    if (
        weight.device.type != "cpu"
        or weight.dtype not in NAMES
        or not isinstance(layer.act, SiLUActivation | nn.SiLU)
        or any(size % LANES for size in sizes)
        or layer.queries % layer.heads
    ):
        return None
    return NAMES[weight.dtype], layer.head_dim, layer.queries // layer.heads
