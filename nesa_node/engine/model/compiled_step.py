"""Recorded decode steps: kernel calls for a fixed number of tokens, replayed without torch.

Beside reading weights a small batch costs dispatch: with cold caches 5 to 30 us for each of torch's
some thirty operations a layer. Here buffers and the arguments of machine code keep their addresses
between steps (as in a CUDA graph): a layer is five kernels and four products, called without
arguments.

T tokens, D hidden, F inner size, Q query heads, H key/value heads, E head size, P positions, S
slots.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from nesa_node.compression.tensors import BufferRange
from nesa_node.core.settings.choices import CacheDtype
from nesa_node.engine.adapters.segments import AdapterSegments
from nesa_node.engine.cache.paged_attention import PackedRow, PackedRows
from nesa_node.engine.cache.pages import PagePool
from nesa_node.engine.kernels.linear import DTYPE_NAMES, FastLinear, KernelLaunch
from nesa_node.engine.kernels.machine_code import NativeFunction, compile_functions
from nesa_node.engine.model.fused_decoder import (
    DOWN,
    GATE_UP,
    OUTPUT,
    QKV,
    FusedDecoder,
    FusedLayer,
    RMSNorm,
)

COMPILED_MAX_TOKENS = 32
"""Tokens in a step. Above, torch's whole-tensor operations are cheap and its attention faster."""
MAX_COMPILED_STEPS = 48
"""Bounds memory: each takes up to 10 kB per layer, and clients choose the sub-spans they use."""
MAX_VECTOR_FLOATS = 16
"""Floats in the widest vector register; sizes must be multiples of it."""
MULTITHREAD_MIN_SLOT_HEADS = 1 << 14
"""Slots times heads from which attention is multithreaded: below, waking threads takes longer."""

SCRATCH_FIELD, NUM_TOKENS_FIELD, SCRATCH_STRIDE_FIELD = 7, 8, 10
"""Indices of the `attend` fields that change with every step."""


class DecoderFunctions(NamedTuple):
    """Machine code for one dtype and head shape (`native/decoder_ops.py`)."""

    add_rms_norm: NativeFunction
    rope_and_store_kv: NativeFunction
    paged_attention: NativeFunction
    silu_and_mul: NativeFunction


class ScratchBuffers:
    """Scratch buffers of all layers for up to `max_tokens` tokens: one per name, shape, dtype."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tensors: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}

    def get(self, name: str, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return a contiguous [T, width] buffer. Programs share it: contents last for one step."""
        return self._get_or_allocate(name, (self._max_tokens, width), dtype)[:tokens]

    def scratch(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return scratch memory [count], valid until the next call that uses it."""
        return self._get_or_allocate("scratch", (1 << (count - 1).bit_length(),), dtype)[:count]

    def _get_or_allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        key = name, shape, dtype
        if key not in self._tensors:
            # An inference-mode tensor could not be written outside inference mode.
            with torch.inference_mode(False):
                self._tensors[key] = torch.empty(shape, dtype=dtype)
        return self._tensors[key]


class CompiledStep:
    """A recorded step of `tokens` tokens through `layers`, with the KV cache in `pool`."""

    def __init__(
        self,
        functions: DecoderFunctions,
        layers: Sequence[FusedLayer],
        buffers: ScratchBuffers,
        tokens: int,
        rotary_tables: tuple[Tensor, Tensor],
        pool: PagePool,
        segments: AdapterSegments | None,
    ) -> None:
        """`rotary_tables`: cosines and signed sines [P, 1, E].

        With `segments` it also computes the products of any adapters that these begin with.
        """
        self._functions = functions
        self._segments = segments
        self._buffers = buffers
        self._tokens = tokens
        self._rotary_tables = rotary_tables
        self._pool = weakref.ref(pool)
        self._step = _StepState(tokens, buffers)
        self._calls: list[KernelLaunch] = []
        self._references: list[object] = []
        """Keeps alive what the calls point to."""
        self._hidden_size = len(layers[0].input_norm.weight)
        self._dtype = layers[0].input_norm.weight.dtype
        self._hidden_TD = self._buffer("hidden", self._hidden_size)
        self._update_TD = self._buffer("added", self._hidden_size)
        """Last sublayer's output, added to `_hidden_TD` by the next norm."""
        self._hidden = BufferRange.from_tensor(self._hidden_TD)
        self._update = BufferRange.from_tensor(self._update_TD)
        self._uses_torch = False
        for layer in layers:
            self._add_layer(layer, pool)
        # Adds the last layer's MLP output to the hidden states; the norm's own output is unused.
        self._add_norm(layers[-1].post_attention_norm)

    def is_valid_for(self, rotary_tables: tuple[Tensor, Tensor], pool: PagePool) -> bool:
        """Whether the recorded addresses are still those of `rotary_tables` and `pool`."""
        return self._pool() is pool and self._rotary_tables is rotary_tables

    def run(
        self, inputs: Iterable[BufferRange], outputs: Iterable[BufferRange], packed: PackedRows
    ) -> None:
        """Copy the packed hidden states from `inputs`, run, and copy the result to `outputs`."""
        self._step.begin(packed)
        address = self._hidden.address
        for part in inputs:
            ctypes.memmove(address, *part)
            address += part.nbytes
        ctypes.memset(self._update.address, 0, self._update.nbytes)
        try:
            if self._uses_torch or self._step.multi_token_rows:
                with torch.inference_mode():
                    self._run_calls()
            else:
                self._run_calls()
        finally:
            self._step.end()
        address = self._hidden.address
        for part in outputs:
            ctypes.memmove(part.address, address, part.nbytes)
            address += part.nbytes

    def _run_calls(self) -> None:
        for call in self._calls:
            call()

    def _add_layer(self, layer: FusedLayer, pool: PagePool) -> None:
        code, step, added_TD = self._functions, self._step, self._update_TD
        normed_TD = self._add_norm(layer.input_norm)
        qkv = self._buffer("qkv", (layer.num_q_heads + 2 * layer.num_kv_heads) * layer.head_dim)
        self._add_matmul(layer, QKV, normed_TD, qkv)
        if layer.qk_norm is not None:
            self._calls.append(partial(_normalize_queries_and_keys, layer, qkv))
            self._uses_torch = True
        number = layer.layer_idx - pool.span.start
        cache = _CacheAddresses.of_block(pool, number)
        rotate = code.rope_and_store_kv.bind(
            qkv.data_ptr(),
            *(table.data_ptr() for table in self._rotary_tables),
            *cache.stored,
            ctypes.addressof(step.positions),
            ctypes.addressof(step.slots),
            self._tokens,
            layer.num_q_heads,
            layer.num_kv_heads,
            *cache.scales,
        )
        self._calls.append(rotate.run)
        attended = self._buffer("attended", layer.num_q_heads * layer.head_dim)
        self._calls.append(_AttentionCall(code.paged_attention, layer, qkv, cache, attended, step))
        self._add_matmul(layer, OUTPUT, attended, added_TD)
        normed_TD = self._add_norm(layer.post_attention_norm)
        inner = layer.down_proj.in_features
        gate_up, active_TF = self._buffer("gate and up", 2 * inner), self._buffer("active", inner)
        self._add_matmul(layer, GATE_UP, normed_TD, gate_up)
        fields = gate_up.data_ptr(), active_TF.data_ptr(), self._tokens, inner
        self._calls.append(code.silu_and_mul.bind(*fields).run)
        self._add_matmul(layer, DOWN, active_TF, added_TD)

    def _add_norm(self, norm: RMSNorm) -> Tensor:
        normed_TD = self._buffer("normed", self._hidden_size)
        job = self._functions.add_rms_norm.bind(
            self._hidden_TD.data_ptr(),
            self._update_TD.data_ptr(),
            norm.weight.data_ptr(),
            normed_TD.data_ptr(),
            self._tokens,
            self._hidden_size,
            float_as_field(norm.eps),
        )
        self._references.append(norm)
        self._calls.append(job.run)
        return normed_TD

    def _add_matmul(
        self, layer: FusedLayer, index: int, input_TI: Tensor, output_TO: Tensor
    ) -> None:
        linear: Any = (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)[index]
        calls = None
        if isinstance(linear, FastLinear):
            calls = linear.bind_into(input_TI, self._buffers.scratch, output_TO)
        if calls is None:
            calls = [partial(_copy_product, linear, input_TI, output_TO)]
            self._uses_torch = True
        self._calls += calls
        self._references.append(linear)
        if self._segments is not None:
            self._calls.append(self._segments.bind(layer.layer_idx, index, input_TI, output_TO))

    def _buffer(self, name: str, width: int) -> Tensor:
        return self._buffers.get(name, self._tokens, width, self._dtype)


def _copy_product(linear: Any, input_TI: Tensor, output_TO: Tensor) -> None:
    """Compute the product of a linear layer without prepared calls."""
    output_TO.copy_(linear.forward(input_TI))


def _normalize_queries_and_keys(layer: FusedLayer, qkv: Tensor) -> None:
    """RMS norm of a layer's query and key heads, in place (Qwen3)."""
    assert layer.qk_norm is not None
    turned = qkv.view(len(qkv), -1, layer.head_dim)[:, : layer.num_rotary_heads]
    turned.copy_(layer.qk_norm.forward(turned))


class _CacheAddresses(NamedTuple):
    """Addresses of a block's keys and values, and of their scales in int8 (else 0)."""

    stored: tuple[int, int]
    scales: tuple[int, int]

    @classmethod
    def of_block(cls, pool: PagePool, number: int) -> _CacheAddresses:
        sides = pool.keys[number], pool.values[number]
        keys, values = (side.stored_SHD.data_ptr() for side in sides)
        of_keys, of_values = (
            0 if side.scales_SH is None else side.scales_SH.data_ptr() for side in sides
        )
        return cls((keys, values), (of_keys, of_values))


class _AttentionCall:
    """Attention of a layer, written to `attended` [T, Q x E]."""

    def __init__(
        self,
        attend: NativeFunction,
        layer: FusedLayer,
        qkv: Tensor,
        cache: _CacheAddresses,
        attended: Tensor,
        step: _StepState,
    ) -> None:
        self._function, self._layer, self._step = attend, layer, step
        self._qkv, self._attended = qkv, attended
        self._visible = step.visible_slots(layer)
        pointers = qkv.data_ptr(), *cache.stored, attended.data_ptr(), *self._visible.addresses
        scale = float_as_field(layer.scaling)
        self._fields = *pointers, 0, 0, layer.num_kv_heads, 0, scale, *cache.scales
        self._threads = 1
        self._kernel_call = attend.bind(*self._fields)

    def __call__(self) -> None:
        seen, step = self._visible, self._step
        if seen.tokens:
            if seen.threads != self._threads:
                self._threads = seen.threads
                self._kernel_call = self._function.bind(*self._fields, threads=seen.threads)
            self._kernel_call.set_field(SCRATCH_FIELD, seen.scratch)
            self._kernel_call.set_field(NUM_TOKENS_FIELD, seen.tokens)
            self._kernel_call.set_field(SCRATCH_STRIDE_FIELD, seen.scratch_stride)
            self._kernel_call.run()
        if not step.multi_token_rows:
            return
        layer, qkv, packed = self._layer, self._qkv, step.packed
        assert packed is not None
        query_TQE = qkv.view(len(qkv), -1, layer.head_dim)[:, : layer.num_q_heads]
        for row in step.multi_token_rows:
            output_LQE = packed.compute_attention(
                layer.layer_idx, query_TQE, layer.scaling, window=layer.window, rows=[row]
            )
            self._attended[row.start : row.start + row.count] = output_LQE.flatten(1)


class _StepState:
    """State of the running step, which all layers share."""

    def __init__(self, tokens: int, buffers: ScratchBuffers) -> None:
        self._buffers = buffers
        self.packed: PackedRows | None = None
        self.multi_token_rows: list[PackedRow] = []
        """Rows with several tokens: these share what they read, so torch's attention is faster."""
        self.positions = (ctypes.c_int64 * tokens)()
        self.slots = (ctypes.c_int64 * tokens)()
        self._tokens = tokens
        self._visible_slots: dict[tuple[int | None, int, int], _VisibleSlots] = {}

    def begin(self, packed: PackedRows) -> None:
        self.packed = packed
        self.multi_token_rows = []
        single_rows: list[PackedRow] = []
        at = 0
        for row in packed.rows:
            (single_rows if row.count == 1 else self.multi_token_rows).append(row)
            first = _first_slot(row)
            for position in range(row.past, row.past + row.count):
                self.positions[at] = position
                self.slots[at] = first + position
                at += 1
        for seen in self._visible_slots.values():
            seen.begin(single_rows)

    def end(self) -> None:
        """Drop references, so that a pool that is given up can be freed."""
        self.packed = None
        self.multi_token_rows = []

    def visible_slots(self, layer: FusedLayer) -> _VisibleSlots:
        """Return the visible slots for layers with this window and head shape."""
        key = layer.window, layer.num_q_heads // layer.num_kv_heads, layer.num_kv_heads
        if key not in self._visible_slots:
            self._visible_slots[key] = _VisibleSlots(self._tokens, self._buffers, *key)
        return self._visible_slots[key]


class _VisibleSlots:
    """Range of slots that each token attends to, for rows with a single token in this step."""

    def __init__(
        self, max_tokens: int, buffers: ScratchBuffers, window: int | None, group: int, heads: int
    ) -> None:
        self._buffers = buffers
        self._window, self._group, self._heads = window, group, heads
        self._index_arrays = [(ctypes.c_int64 * max_tokens)() for _ in range(3)]
        self.addresses = [ctypes.addressof(numbers) for numbers in self._index_arrays]
        """Addresses of three int64 arrays: token indices, first slots, numbers of slots."""
        self.tokens = 0
        self.scratch_stride = 0
        self.threads = 1
        self._scratch_floats = 0
        self.scratch = 0
        """Address of scratch memory for `_scratch_floats` scores."""

    def begin(self, rows: Sequence[PackedRow]) -> None:
        self.tokens = len(rows)
        tokens, firsts, counts = self._index_arrays
        total = most = 0
        for index, row in enumerate(rows):
            end = row.past + 1
            skipped = 0 if self._window is None else max(end - self._window, 0)
            tokens[index] = row.start
            firsts[index] = _first_slot(row) + skipped
            counts[index] = count = end - skipped
            total += count
            most = max(most, count)
        self.scratch_stride = -(-most // MAX_VECTOR_FLOATS) * MAX_VECTOR_FLOATS
        is_long = total * self._heads >= MULTITHREAD_MIN_SLOT_HEADS
        self.threads = torch.get_num_threads() if is_long else 1
        size = self.threads * self._group * self.scratch_stride
        if size > self._scratch_floats:
            scratch = self._buffers.scratch(size, torch.float32)
            self._scratch_floats, self.scratch = len(scratch), scratch.data_ptr()


def _first_slot(row: PackedRow) -> int:
    assert isinstance(row.slots, slice)
    start: int = row.slots.start
    return start


def float_as_field(value: float) -> int:
    """Encode a float32 as an integer field of a machine-code function."""
    return int.from_bytes(struct.pack("<f", value), "little")


class CompiledDecoder:
    """Compiled steps through layers of one shape and dtype, recorded once for each batch size."""

    def __init__(self, layers: Iterable[FusedLayer], cache_dtype: CacheDtype) -> None:
        """Raises `ValueError` for unsupported or unequal layer shapes, or without a compiler."""
        [shape, *others] = {_layer_shape(layer) for layer in layers}
        if others or shape is None:
            raise ValueError("these layers' sizes, activation, dtype or device have none")
        dtype, dim, group = shape
        functions = compile_functions(
            ("add_and_norm", dtype),
            ("rotate", dtype, dim, cache_dtype),
            ("attend", dtype, dim, group, cache_dtype),
            ("activate", dtype),
        )
        if functions is None:
            raise ValueError("there is no machine code for this processor")
        self._functions = DecoderFunctions(*functions)
        self._cache_dtype = cache_dtype
        self._buffers = ScratchBuffers(COMPILED_MAX_TOKENS)
        self._steps: dict[tuple[int, int, int, int, bool], CompiledStep] = {}
        """Least recently used first."""

    def supports(self, packed: PackedRows) -> bool:
        """Whether the batch is small enough, and each row's cache is contiguous and of its kind."""
        if packed.tokens > COMPILED_MAX_TOKENS or packed.pool.cache_dtype != self._cache_dtype:
            return False
        # A loop, since `all` takes three times as long.
        for row in packed.rows:  # noqa: SIM110
            if not isinstance(row.slots, slice):
                return False
        return True

    def run(
        self,
        decoder: FusedDecoder,
        inputs: Iterable[BufferRange],
        outputs: Iterable[BufferRange],
        packed: PackedRows,
        segments: AdapterSegments | None = None,
    ) -> None:
        """Run `decoder.forward` from memory to memory, in the layers' dtype.

        `decoder` has all or some of the layers that this object was made for. `segments` are
        always the same, and compute in machine code (`is_native`).
        """
        tokens, layers = packed.tokens, decoder.ordered_layers
        rotary_tables = decoder.rotary_cache.tables_for(packed.max_length)
        # Sub-spans share this object.
        threads = torch.get_num_threads()
        key = tokens, layers[0].layer_idx, len(layers), threads, segments is not None
        program = self._steps.get(key)
        if program is None or not program.is_valid_for(rotary_tables, packed.pool):
            program = CompiledStep(
                self._functions,
                layers,
                self._buffers,
                tokens,
                rotary_tables,
                packed.pool,
                segments,
            )
        self._steps.pop(key, None)
        self._steps[key] = program
        if len(self._steps) > MAX_COMPILED_STEPS:
            del self._steps[next(iter(self._steps))]
        program.run(inputs, outputs, packed)


def _layer_shape(layer: FusedLayer) -> tuple[str, int, int] | None:
    """Return a layer's dtype, E and G; None if no machine code supports it."""
    weight = layer.post_attention_norm.weight
    sizes = (len(weight), layer.down_proj.in_features, layer.head_dim // 2)
    if (
        weight.device.type != "cpu"
        or weight.dtype not in DTYPE_NAMES
        or not isinstance(layer.act_fn, SiLUActivation | nn.SiLU)
        or any(size % MAX_VECTOR_FLOATS for size in sizes)
        or layer.num_q_heads % layer.num_kv_heads
    ):
        return None
    return DTYPE_NAMES[weight.dtype], layer.head_dim, layer.num_q_heads // layer.num_kv_heads
