"""A loaded span of a model's blocks, and the input and output buffers of a step.

T packed tokens of all rows in a step, L tokens of one row, D hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from nesa_node.compression.tensors import BufferRange, HiddenStates
from nesa_node.core.errors import ContextLengthError, UnsupportedModelError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import CacheDtype
from nesa_node.engine.adapters.peft_folder import MAX_ADAPTER_BYTES, PeftFolder
from nesa_node.engine.adapters.segments import AdapterSegments
from nesa_node.engine.adapters.served_adapter import ServedAdapter, ServedLinear, SpanLayout
from nesa_node.engine.cache.paged_attention import PackedRows, RowCache, RowChunk
from nesa_node.engine.cache.pages import PagePool
from nesa_node.engine.kernels.quantized_experts import QuantizedExperts
from nesa_node.engine.kernels.quantized_linear import QuantizedLinear
from nesa_node.engine.kernels.threads import ThreadController
from nesa_node.engine.model.compiled_step import CompiledDecoder
from nesa_node.engine.model.fused_decoder import FusedDecoder
from nesa_node.engine.model.splice import run_decoder, slice_decoder
from nesa_node.engine.weights.checkpoint import Checkpoint


@dataclass(eq=False, slots=True)
class StepBuffers:
    """Input [T, D] and output of a step through a span, which may run in several slices."""

    hidden: HiddenStates
    dtype: torch.dtype
    """Of the output."""
    output: HiddenStates | None = None
    """Complete when all slices have run."""

    def write_output(self, start: int, end: int, output_TD: Tensor) -> None:
        """Store the output of tokens `start:end`, which is on the CPU."""
        output_TD = output_TD.to(self.dtype)
        # A slice of a larger batch's storage is copied, so that keeping it does not keep the whole
        # batch.
        is_all = end - start == self.hidden.num_tokens
        if is_all and output_TD.untyped_storage().nbytes() == output_TD.nbytes:
            self.output = HiddenStates.from_tensor(output_TD)
        else:
            self._get_or_allocate_output().tensor_TD[start:end] = output_TD

    def output_range(self, start: int, end: int) -> BufferRange:
        """Memory for the output of tokens `start:end`."""
        return self._get_or_allocate_output().buffer_range(start, end)

    def _get_or_allocate_output(self) -> HiddenStates:
        if self.output is None:
            self.output = HiddenStates.zeros(self.hidden.meta.shape, self.dtype)
        return self.output


class TokenSlice(Protocol):
    """Tokens `start:end` of a `StepBuffers`, packed into a batch."""

    start: int
    end: int

    @property
    def buffers(self) -> StepBuffers: ...


__all__ = ["ModelBlocks", "RowChunk"]


T = TypeVar("T")


class ModelBlocks:
    """Forward pass of a span for the next tokens of many rows, with KV caches in a `PagePool`.

    Not thread-safe: one executor thread owns it. It keeps no state between steps.
    """

    def __init__(
        self,
        decoder: nn.Module,
        checkpoint: Checkpoint,
        span: Span,
        *,
        weight_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: CacheDtype = "auto",
    ) -> None:
        """`decoder` runs `span` on `inputs_embeds` and returns the last block's raw output."""
        self.threads = ThreadController()
        """Shared by selections."""
        self.span = span
        self.num_blocks = len(span)
        self.hidden_size = int(checkpoint.config.hidden_size)
        self.context_length = checkpoint.context_length
        self.dtype = dtype
        self.cache_dtype: CacheDtype = cache_dtype
        """What `new_pool` holds keys and values in."""
        self.device = device
        self.weight_bytes = weight_bytes
        self._decoder: Any = decoder
        self._compiled_decoder: CompiledDecoder | None = None
        if isinstance(decoder, FusedDecoder):
            with suppress(ValueError):  # no machine code supports such layers
                self._compiled_decoder = CompiledDecoder(decoder.ordered_layers, cache_dtype)
        self._family = checkpoint.family
        heads = self._family.list_cache_heads(checkpoint.config)
        self._cache_heads = heads[span.start : span.end]
        self._segments: AdapterSegments | None = None
        """Shared by selections; None where blocks differ in their linear layers."""
        self._unhooked: list[tuple[nn.Module, int, int]] = []
        """Linear layers that have no hook yet, with block and index in the layout."""
        self._prepare_adapters(checkpoint)
        self._selections: dict[Span, ModelBlocks] = {}

    @property
    def cache_bytes_per_token(self) -> int:
        """KV cache of one token in all blocks."""
        return sum(
            heads.bytes_per_token(self.dtype, self.cache_dtype) for heads in self._cache_heads
        )

    @property
    def full_cache_bytes_per_token(self) -> int:
        """The same of a cache that holds values as they are computed."""
        return sum(heads.bytes_per_token(self.dtype) for heads in self._cache_heads)

    def modules(self) -> Iterator[nn.Module]:
        """All modules of the span, at any depth."""
        return iter(self._decoder.modules())

    def routers(self) -> list[nn.Module]:
        """The modules that choose experts, one of each block that has some."""
        if (path := self._family.router) is None:
            return []
        layers = getattr(self._decoder, self._family.layers_name)
        return [
            module
            for layer in layers
            for name, module in layer.named_modules()
            if name == path  # a mixture may begin with dense blocks
        ]

    def split_layers(self) -> list[dict[str, nn.Module | Tensor]]:
        """For each block its linear layers, quantized experts, and other weights, in shared memory.

        By their names in transformers' layer.
        """
        if isinstance(self._decoder, FusedDecoder):
            return [layer.split() for layer in self._decoder.ordered_layers]
        return [_split_layer(layer) for layer in getattr(self._decoder, self._family.layers_name)]

    @property
    def adapter_layout(self) -> SpanLayout:
        """What adapters have to fit. It is that of the whole loaded span, for parts of it too.

        Raises `UnsupportedModelError` where blocks differ in their linear layers.
        """
        if self._segments is None:
            raise UnsupportedModelError("this model's blocks differ; adapters cannot be served")
        return self._segments.layout

    def load_adapter(
        self, folder: Path | PeftFolder, *, max_bytes: int = MAX_ADAPTER_BYTES
    ) -> ServedAdapter:
        """Load the part of a LoRA adapter that belongs to the loaded span, for `RowChunk.adapter`.

        May run in any thread, beside iterations. Blocks it, and raises as `ServedAdapter.load` and
        `adapter_layout` do.
        """
        return ServedAdapter.load(folder, self.adapter_layout, max_bytes=max_bytes)

    def _prepare_adapters(self, checkpoint: Checkpoint) -> None:
        if isinstance(self._decoder, FusedDecoder):
            of_blocks = [layer.served_linears() for layer in self._decoder.ordered_layers]
        else:
            of_blocks = []
            for block, parts in enumerate(self.split_layers(), self.span.start):
                linears = {
                    name: part
                    for name, part in parts.items()
                    if isinstance(part, nn.Linear | QuantizedLinear)
                }
                self._unhooked += [
                    (linear, block, index) for index, linear in enumerate(linears.values())
                ]
                of_blocks.append(
                    tuple(_describe_linear(name, linear) for name, linear in linears.items())
                )
        first, *others = of_blocks
        if any(linears != first for linears in others):
            return
        self._segments = AdapterSegments(
            SpanLayout(
                self.span,
                checkpoint.num_blocks,
                checkpoint.family.layers_path,
                first,
                self.dtype,
                self.device,
            )
        )

    def select(self, span: Span) -> ModelBlocks:
        """Return a sub-span that shares these weights. Raises `ValueError` outside this span."""
        if span == self.span:
            return self
        if not len(span) or not self.span.covers(span):
            raise ValueError(f"blocks {span} are not within {self.span}")
        if span not in self._selections:
            start = span.start - self.span.start
            local = Span(start, start + len(span))
            part = copy.copy(self)
            part.span, part.num_blocks = span, len(span)
            part.weight_bytes = self.weight_bytes * part.num_blocks // self.num_blocks
            part._cache_heads = self._cache_heads[local.start : local.end]
            part._selections = {}
            if isinstance(self._decoder, FusedDecoder):
                part._decoder = self._decoder.select_layers(local)
            else:
                part._decoder = slice_decoder(self._decoder, self._family.layers_name, local)
            self._selections[span] = part
        return self._selections[span]

    def new_pool(self, tokens: int) -> PagePool:
        """Return an empty KV cache with room for `tokens` tokens of all rows together."""
        return PagePool(
            self.span,
            self._cache_heads,
            tokens=tokens,
            dtype=self.dtype,
            device=self.device,
            cache_dtype=self.cache_dtype,
        )

    def forward(self, hidden_TD: Tensor, runs: Sequence[RowChunk]) -> Tensor:
        """Run the next tokens of each run's row, packed in the order of `runs`, and cache them.

        Every run's table must have room (`reserve`) and belong to a pool that covers this span.
        `hidden_TD` may have any floating dtype and device, and is not modified. The result [T, D]
        has this span's dtype and device. If it raises, all rows keep their length. Raises
        `ContextLengthError`, and `ValueError` for a wrong shape, or another span's pool or adapter.
        """
        self._check(hidden_TD.shape, runs)
        return self._run_on_tuned_threads(lambda: self._forward(hidden_TD, runs), len(hidden_TD))

    def _run_on_tuned_threads(self, job: Callable[[], T], tokens: int) -> T:
        if self.device.type != "cpu":
            return job()
        return self.threads.run(job, tokens, self.num_blocks)

    @torch.inference_mode()
    def _forward(self, hidden_TD: Tensor, runs: Sequence[RowChunk]) -> Tensor:
        packed = self._pack(runs)
        inputs_TD = hidden_TD.to(device=self.device, dtype=self.dtype)
        with self._begin_segments(runs) as segments:
            if packed is None:
                output_TD = self._forward_row_by_row(inputs_TD[None], runs, segments)
            elif compiled := self._compiled_decoder_for(packed, segments):
                inputs_TD = inputs_TD.contiguous()
                output_TD = torch.empty_like(inputs_TD)
                source = BufferRange.from_tensor(inputs_TD)
                target = BufferRange.from_tensor(output_TD)
                compiled.run(self._decoder, [source], [target], packed, segments)
            elif isinstance(self._decoder, FusedDecoder):
                output_TD = self._decoder.forward(inputs_TD, packed, segments)
            else:
                output_TD = self._call_decoder(
                    inputs_TD[None], packed.positions_1T, packed, packed=packed
                )
        _advance_lengths(runs)
        return output_TD

    @contextmanager
    def _begin_segments(self, runs: Sequence[RowChunk]) -> Iterator[AdapterSegments | None]:
        """Begin an iteration with adapters; None if no run has one."""
        for run in runs:
            if run.adapter is not None:
                break
        else:
            yield None
            return
        segments = self._segments
        assert segments is not None
        while self._unhooked:
            linear, block, index = self._unhooked.pop()
            linear.register_forward_hook(partial(_add_low_rank, segments, block, index))
        segments.begin([(run.adapter, run.count) for run in runs])
        try:
            yield segments
        finally:
            segments.end()

    def forward_buffers(self, pieces: Sequence[TokenSlice], runs: Sequence[RowChunk]) -> None:
        """Run `forward` on buffers: `pieces` are the packed tokens of `runs`, in the same order.

        Small batches create no tensor: machine code reads and writes the buffers' memory directly.
        """
        tokens = 0
        for piece in pieces:
            tokens += piece.end - piece.start
        self._check((tokens, pieces[0].buffers.hidden.meta.shape[1]), runs)
        self._run_on_tuned_threads(lambda: self._forward_buffers(pieces, runs), tokens)

    def _forward_buffers(self, pieces: Sequence[TokenSlice], runs: Sequence[RowChunk]) -> None:
        packed = self._pack(runs)
        with self._begin_segments(runs) as segments:
            if packed is not None and (
                compiled := self._compiled_decoder_for(packed, segments, pieces)
            ):
                inputs = [each.buffers.hidden.buffer_range(each.start, each.end) for each in pieces]
                outputs = [each.buffers.output_range(each.start, each.end) for each in pieces]
                compiled.run(self._decoder, inputs, outputs, packed, segments)
                _advance_lengths(runs)
                return
        parts = [piece.buffers.hidden.tensor_TD[piece.start : piece.end] for piece in pieces]
        if len({part_LD.dtype for part_LD in parts}) > 1:
            parts = [part_LD.to(self.dtype) for part_LD in parts]
        output_TD = self._forward(parts[0] if len(parts) == 1 else torch.cat(parts), runs).cpu()
        outputs_LD = torch.split(output_TD, [len(part_LD) for part_LD in parts])
        for piece, output_LD in zip(pieces, outputs_LD, strict=True):
            piece.buffers.write_output(piece.start, piece.end, output_LD)

    def _pack(self, runs: Sequence[RowChunk]) -> PackedRows | None:
        return PackedRows(runs[0].table.pool, runs) if self._family.packs_rows else None

    def _compiled_decoder_for(
        self,
        packed: PackedRows,
        segments: AdapterSegments | None,
        pieces: Sequence[TokenSlice] = (),
    ) -> CompiledDecoder | None:
        """The compiled decoder, if it supports this batch."""
        compiled = self._compiled_decoder
        if compiled is None or not compiled.supports(packed):
            return None
        if segments is not None and not segments.is_native:
            return None
        for piece in pieces:
            if piece.buffers.hidden.dtype != self.dtype or piece.buffers.dtype != self.dtype:
                return None
        return compiled

    def _forward_row_by_row(
        self, inputs_1TD: Tensor, runs: Sequence[RowChunk], segments: AdapterSegments | None
    ) -> Tensor:
        outputs, start = [], 0
        for run in runs:
            if segments is not None:
                segments.begin([(run.adapter, run.count)])
            end = run.table.length + run.count
            positions_1L = torch.arange(run.table.length, end, device=self.device)[None]
            inputs_1LD = inputs_1TD[:, start : start + run.count]
            outputs.append(self._call_decoder(inputs_1LD, positions_1L, RowCache(run)))
            start += run.count
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _call_decoder(
        self, inputs_1LD: Tensor, positions_1L: Tensor, cache: PackedRows | RowCache, **extra: Any
    ) -> Tensor:
        return run_decoder(
            self._decoder,
            self._family,
            inputs_1LD,
            position_ids=positions_1L,
            past_key_values=cache,
            use_cache=True,
            **extra,
        )[0]

    def _check(self, shape: Sequence[int], runs: Sequence[RowChunk]) -> None:
        if not runs:
            raise ValueError("expected at least one run")
        tokens = 0
        pool = runs[0].table.pool
        for run in runs:
            # The pool of a whole span has that span itself.
            if run.table.pool is not pool or not (
                pool.span is self.span or pool.span.covers(self.span)
            ):
                raise ValueError(f"a cache of blocks {pool.span} cannot serve blocks {self.span}")
            tokens += run.count
            if run.count < 1:
                raise ValueError(f"expected runs of at least one token, got {run.count}")
            end, room = run.table.length + run.count, run.table.capacity
            adapter = run.adapter
            if adapter is not None and adapter.layout is not self.adapter_layout:
                raise ValueError(f"an adapter of blocks {adapter.layout.span}, loaded elsewhere")
            if end > self.context_length:
                raise ContextLengthError(f"{end} tokens; the model holds {self.context_length}")
            if end > room:
                raise ValueError(f"{end} tokens in pages for {room}: reserve them first")
        if tuple(shape) != (tokens, self.hidden_size):
            raise ValueError(f"expected [{tokens}, {self.hidden_size}], got {list(shape)}")


def _advance_lengths(runs: Sequence[RowChunk]) -> None:
    for run in runs:
        run.table.length += run.count


def _describe_linear(name: str, linear: Any) -> ServedLinear:
    return ServedLinear.join(linear.in_features, {name: linear.out_features})


def _add_low_rank(
    segments: AdapterSegments,
    block: int,
    index: int,
    _: nn.Module,
    inputs: tuple[Tensor, ...],
    output: Tensor,
) -> None:
    """Forward hook of a linear layer: add the products of the running iteration's adapters."""
    input_TI = inputs[0].reshape(-1, inputs[0].shape[-1]).contiguous()
    segments.add(block, index, input_TI, output.view(-1, output.shape[-1]))


def _split_layer(layer: nn.Module) -> dict[str, nn.Module | Tensor]:
    parts: dict[str, nn.Module | Tensor] = {}
    inside: tuple[str, ...] = ()
    for path, module in layer.named_modules():
        if path.startswith(inside):
            continue
        if isinstance(module, nn.Linear | QuantizedLinear | QuantizedExperts):
            parts[path] = module
            inside += (f"{path}.",)
            continue
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None and name not in module._non_persistent_buffers_set:
                parts[f"{path}.{name}" if path else name] = value
    return parts
