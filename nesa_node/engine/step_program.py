"""Recorded decode step: kernel calls for a fixed number of tokens, replayed without torch.

With cold caches torch takes 10 to 20 us to dispatch an operation, longer than to compute it. Here
buffers and the arguments of machine code keep their addresses between steps (as in a CUDA graph),
so that a layer is about ten calls without arguments.

T tokens, D hidden, F inner size, Q query heads, H key/value heads, E head size, P positions, S
slots.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nesa_node.compression.hidden_states import Range
from nesa_node.engine.attention import PackedRuns, Row
from nesa_node.engine.linear import Call, Linear
from nesa_node.engine.machine_code import Function
from nesa_node.engine.pages import PagePool

if TYPE_CHECKING:
    from nesa_node.engine.fused_layers import FusedLayer, Norm

LANES = 16
"""Floats in the widest vector register; sizes must be multiples of it."""
WORTH_THREADS = 1 << 14
"""Slots times heads from which attention is multithreaded: below, waking threads takes longer."""

SCRATCH, SEEING, ROOM = 7, 8, 10
"""Indices of the `attend` fields that change with every step."""


class Functions(NamedTuple):
    """Machine code for one dtype and head shape (`native/layer.py`)."""

    add_and_norm: Function
    rotate: Function
    attend: Function
    activate: Function


class Buffers:
    """Scratch buffers of all layers for up to `most_tokens` tokens: one per name, width, dtype."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._tensors: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def get(self, name: str, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return a contiguous [T, width] buffer. Programs share it: contents last for one step."""
        key = name, width, dtype
        if key not in self._tensors:
            self._tensors[key] = _empty((self._most_tokens, width), dtype)
        return self._tensors[key][:tokens]

    def room(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return scratch memory [count], valid until the next call that uses it."""
        size = 1 << (count - 1).bit_length()
        key = "room", size, dtype
        if key not in self._tensors:
            self._tensors[key] = _empty((size,), dtype)
        return self._tensors[key][:count]


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # An inference-mode tensor could not be written outside inference mode.
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype)


class StepProgram:
    """A recorded step of `tokens` tokens through `layers`, with the KV cache in `pool`."""

    def __init__(
        self,
        functions: Functions,
        layers: Sequence[FusedLayer],
        buffers: Buffers,
        tokens: int,
        tables: tuple[Tensor, Tensor],
        pool: PagePool,
    ) -> None:
        """`tables`: cosines and signed sines [P, 1, E]."""
        self._functions = functions
        self._buffers = buffers
        self._tokens = tokens
        self._tables = tables
        self._pool = weakref.ref(pool)
        self._step = _Step(tokens, buffers)
        self._calls: list[Call] = []
        self._kept: list[object] = []
        """Keeps alive what the calls point to."""
        self._size = len(layers[0].before_attention.weight)
        self._dtype = layers[0].before_attention.weight.dtype
        self._hidden_TD = self._buffer("hidden", self._size)
        self._added_TD = self._buffer("added", self._size)
        """Last sublayer's output, added to `_hidden_TD` by the next norm."""
        self._hidden, self._added = Range.of(self._hidden_TD), Range.of(self._added_TD)
        self._asks_torch = False
        for layer in layers:
            self._write_layer(layer, pool)
        # Adds the last layer's MLP output to the hidden states; the norm's own output is unused.
        self._write_norm(layers[-1].before_mlp)

    def fits(self, tables: tuple[Tensor, Tensor], pool: PagePool) -> bool:
        """Whether the recorded addresses are still those of `tables` and `pool`."""
        return (
            self._pool() is pool and self._tables[0] is tables[0] and self._tables[1] is tables[1]
        )

    def run(self, inputs: Iterable[Range], outputs: Iterable[Range], packed: PackedRuns) -> None:
        """Copy the packed hidden states from `inputs`, run, and copy the result to `outputs`."""
        self._step.begin(packed)
        address = self._hidden.address
        for part in inputs:
            ctypes.memmove(address, *part)
            address += part.nbytes
        ctypes.memset(self._added.address, 0, self._added.nbytes)
        try:
            if self._asks_torch or self._step.longer_rows:
                with torch.inference_mode():
                    self._call()
            else:
                self._call()
        finally:
            self._step.end()
        address = self._hidden.address
        for part in outputs:
            ctypes.memmove(part.address, address, part.nbytes)
            address += part.nbytes

    def _call(self) -> None:
        for call in self._calls:
            call()

    def _write_layer(self, layer: FusedLayer, pool: PagePool) -> None:
        code, step, added_TD = self._functions, self._step, self._added_TD
        normed_TD = self._write_norm(layer.before_attention)
        qkv = self._buffer("qkv", (layer.queries + 2 * layer.heads) * layer.head_dim)
        self._write_product(layer.qkv, normed_TD, qkv)
        if layer.of_heads is not None:
            self._calls.append(_NormOfHeads(layer, qkv))
            self._asks_torch = True
        number = layer.layer_idx - pool.span.start
        cache = pool.keys_SHD[number].data_ptr(), pool.values_SHD[number].data_ptr()
        rotate = code.rotate.job(
            qkv.data_ptr(),
            *(table.data_ptr() for table in self._tables),
            *cache,
            ctypes.addressof(step.positions),
            ctypes.addressof(step.slots),
            self._tokens,
            layer.queries,
            layer.heads,
        )
        self._calls.append(rotate.run)
        attended = self._buffer("attended", layer.queries * layer.head_dim)
        self._calls.append(_Attention(code.attend, layer, qkv, cache, attended, step))
        self._write_product(layer.out, attended, added_TD)
        normed_TD = self._write_norm(layer.before_mlp)
        inner = layer.down.in_features
        gate_up, active_TF = self._buffer("gate and up", 2 * inner), self._buffer("active", inner)
        self._write_product(layer.gate_up, normed_TD, gate_up)
        fields = gate_up.data_ptr(), active_TF.data_ptr(), self._tokens, inner
        self._calls.append(code.activate.job(*fields).run)
        self._write_product(layer.down, active_TF, added_TD)

    def _write_norm(self, norm: Norm) -> Tensor:
        normed_TD = self._buffer("normed", self._size)
        job = self._functions.add_and_norm.job(
            self._hidden_TD.data_ptr(),
            self._added_TD.data_ptr(),
            norm.weight.data_ptr(),
            normed_TD.data_ptr(),
            self._tokens,
            self._size,
            field(norm.eps),
        )
        self._kept.append(norm)
        self._calls.append(job.run)
        return normed_TD

    def _write_product(self, linear: Any, input_TI: Tensor, output_TO: Tensor) -> None:
        calls = None
        if isinstance(linear, Linear):
            calls = linear.into(input_TI, self._buffers.room, output_TO)
        if calls is None:
            calls = [_Product(linear, input_TI, output_TO)]
            self._asks_torch = True
        self._calls += calls
        self._kept.append(linear)

    def _buffer(self, name: str, width: int) -> Tensor:
        return self._buffers.get(name, self._tokens, width, self._dtype)


class _Product:
    """Product of a linear layer without prepared calls: its output is copied to `output_TO`."""

    def __init__(self, linear: Any, input_TI: Tensor, output_TO: Tensor) -> None:
        self._linear = linear
        self._input_TI = input_TI
        self._output_TO = output_TO

    def __call__(self) -> None:
        self._output_TO.copy_(self._linear.forward(self._input_TI))


class _NormOfHeads:
    """RMS norm of a layer's query and key heads, in place (Qwen3)."""

    def __init__(self, layer: FusedLayer, qkv: Tensor) -> None:
        self._layer = layer
        self._qkv = qkv

    def __call__(self) -> None:
        layer, qkv = self._layer, self._qkv
        assert layer.of_heads is not None
        turned = qkv.view(len(qkv), -1, layer.head_dim)[:, : layer.turned]
        turned.copy_(layer.of_heads.forward(turned))


class _Attention:
    """Attention of a layer, written to `attended` [T, Q x E]."""

    def __init__(
        self,
        attend: Function,
        layer: FusedLayer,
        qkv: Tensor,
        cache: tuple[int, int],
        attended: Tensor,
        step: _Step,
    ) -> None:
        self._attend = attend
        self._layer = layer
        self._qkv = qkv
        self._attended = attended
        self._step = step
        self._seen = step.seen(layer)
        self._before = (qkv.data_ptr(), *cache, attended.data_ptr(), *self._seen.addresses)
        self._scale = field(layer.scaling)
        self._job = attend.job(*self._before, 0, 0, layer.heads, 0, self._scale)

    def __call__(self) -> None:
        seen, step = self._seen, self._step
        if seen.tokens and seen.threads == 1:
            job = self._job
            job.put(SCRATCH, seen.scratch)
            job.put(SEEING, seen.tokens)
            job.put(ROOM, seen.room)
            job.run()
        elif seen.tokens:
            self._attend(
                *self._before,
                seen.scratch,
                seen.tokens,
                self._layer.heads,
                seen.room,
                self._scale,
                threads=seen.threads,
            )
        for row in step.longer_rows:
            self._attend_long(row)

    def _attend_long(self, row: Row) -> None:
        layer, qkv, packed = self._layer, self._qkv, self._step.packed
        assert packed is not None
        query_TQE = qkv.view(len(qkv), -1, layer.head_dim)[:, : layer.queries]
        output_LQE = packed.attend(
            layer.layer_idx, query_TQE, layer.scaling, window=layer.window, rows=[row]
        )
        self._attended[row.start : row.start + row.count] = output_LQE.flatten(1)


class _Step:
    """State of the running step, which all layers share."""

    def __init__(self, tokens: int, buffers: Buffers) -> None:
        self._buffers = buffers
        self.packed: PackedRuns | None = None
        self.longer_rows: list[Row] = []
        """Rows with several tokens: these share what they read, so torch's attention is faster."""
        self.positions = (ctypes.c_int64 * tokens)()
        self.slots = (ctypes.c_int64 * tokens)()
        self._tokens = tokens
        self._seen: dict[tuple[int | None, int, int], _Seen] = {}

    def begin(self, packed: PackedRuns) -> None:
        self.packed = packed
        self.longer_rows = []
        single_rows: list[Row] = []
        at = 0
        for row in packed.rows:
            (single_rows if row.count == 1 else self.longer_rows).append(row)
            first = _start(row)
            for position in range(row.past, row.past + row.count):
                self.positions[at] = position
                self.slots[at] = first + position
                at += 1
        for seen in self._seen.values():
            seen.begin(single_rows)

    def end(self) -> None:
        """Drop references, so that a pool that is given up can be freed."""
        self.packed = None
        self.longer_rows = []

    def seen(self, layer: FusedLayer) -> _Seen:
        """Return the visible slots for layers with this window and head shape."""
        key = layer.window, layer.queries // layer.heads, layer.heads
        if key not in self._seen:
            self._seen[key] = _Seen(self._tokens, self._buffers, *key)
        return self._seen[key]


class _Seen:
    """Range of slots that each token attends to, for rows with a single token in this step."""

    def __init__(
        self, most: int, buffers: Buffers, window: int | None, group: int, heads: int
    ) -> None:
        self._buffers = buffers
        self._window = window
        self._group = group
        self._heads = heads
        self._numbers = [(ctypes.c_int64 * most)() for _ in range(3)]
        self.addresses = [ctypes.addressof(numbers) for numbers in self._numbers]
        """Addresses of three int64 arrays: token indices, first slots, numbers of slots."""
        self.tokens = 0
        self.room = 0
        self.threads = 1
        self._size = 0
        self.scratch = 0
        """Address of scratch memory for `_size` scores."""

    def begin(self, rows: Sequence[Row]) -> None:
        self.tokens = len(rows)
        tokens, firsts, counts = self._numbers
        total = most = 0
        for index, row in enumerate(rows):
            end = row.past + 1
            skipped = 0 if self._window is None else max(end - self._window, 0)
            tokens[index] = row.start
            firsts[index] = _start(row) + skipped
            counts[index] = count = end - skipped
            total += count
            most = max(most, count)
        self.room = -(-most // LANES) * LANES
        self.threads = torch.get_num_threads() if total * self._heads >= WORTH_THREADS else 1
        size = self.threads * self._group * self.room
        if size > self._size:
            room = self._buffers.room(size, torch.float32)
            self._size, self.scratch = len(room), room.data_ptr()


def _start(row: Row) -> int:
    assert isinstance(row.slots, slice)
    start: int = row.slots.start
    return start


def field(value: float) -> int:
    """Encode a float32 as an integer field of a machine-code function."""
    return int.from_bytes(struct.pack("<f", value), "little")
