"""Compiled decoding of small batches through Llama-shaped layers.

Beside reading weights, a small step costs dispatch: 5 to 30 us for each of torch's some thirty
operations a layer. Here it is five kernels and four products (`step_program.py`).

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
"""Tokens in a step. Above, torch's whole-tensor operations are cheap and its attention faster."""


MOST_PROGRAMS = 48
"""Bounds memory: each takes up to 10 kB per layer, and clients choose the sub-spans they use."""


class FewTokens:
    """Compiled steps through layers of one shape and dtype, recorded once for each batch size."""

    def __init__(self, layers: Iterable[FusedLayer]) -> None:
        """Raises `ValueError` for unsupported or unequal layer shapes, or without a compiler."""
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
        """Least recently used first."""

    def serves(self, packed: PackedRuns) -> bool:
        """Whether the batch is small enough, and each row's cache is contiguous."""
        if packed.tokens > MOST_TOKENS:
            return False
        # A loop, since `all` takes three times as long.
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
        """Run `layers` on the packed tokens' hidden states, from `inputs` to `outputs`.

        `tables`: cosines and signed sines [P, 1, E].
        """
        tokens = packed.tokens
        # Sub-spans share this object.
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
    """Return a layer's dtype, E and G; None if no machine code supports it."""
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
