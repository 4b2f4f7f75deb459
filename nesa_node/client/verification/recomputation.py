"""Recomputation of a hop's work from the client's own copy of the weights, a few blocks at a time.

Routers of a mixture of experts may choose otherwise where two experts are nearly equal, and honest
outputs are then far apart: tokens of which that may be so are found, and not judged.

L tokens of a row, P positions of it whose outputs are known, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast, get_args

import torch
from torch import Tensor

from nesa_node.client.verification.session_audit import HopWork, NotAuditedError
from nesa_node.compression.tensors import DTYPES
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.adapters.peft_folder import PeftFolder
from nesa_node.engine.model.recomputation import run_blocks, split_runs
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.skeleton import Skeleton
from nesa_node.verification.comparison import PERTURBATIONS, perturb


@dataclass(frozen=True, slots=True, eq=False)
class Recomputation:
    """What a hop's rows should have given."""

    outputs: list[Tensor]
    """Outputs [P, D] of each row, on the CPU."""
    undecided: list[Tensor]
    """Of each row [P], whether a router may have chosen otherwise for that token, or for one that
    it attends to."""

    def judged(self, *alike: Sequence[Tensor]) -> list[list[Tensor]]:
        """Of each of `alike`, rows of [P, D], what can be judged, without rows that have nothing.

        Raises `NotAuditedError` if no token can be.
        """
        if not (kept := self.judged_rows()):
            raise NotAuditedError("its routers were undecided between experts at each token")
        return [[rows[row][~self.undecided[row]] for row in kept] for rows in alike]

    def judged_rows(self) -> list[int]:
        """Rows of which some tokens can be judged."""
        return [row for row, undecided_P in enumerate(self.undecided) if not undecided_P.all()]


def recompute_otherwise(
    checkpoint: Checkpoint, work: HopWork, adapter: PeftFolder | None = None
) -> Iterator[list[Tensor]]:
    """Outputs of further computations for `is_confirmed`: of perturbed inputs, and token by token.

    Each is made when it is asked for, the one that takes longest at last. Blocks the thread. Raises
    as `recompute` does.
    """
    for _ in range(PERTURBATIONS):
        yield recompute(checkpoint, work, adapter, is_perturbed=True).outputs
    yield recompute(checkpoint, work, adapter, by_token=True).outputs


def _recomputed_span(work: HopWork) -> Span:
    """Blocks to run: those before the hop, too, for tokens of a reused prefix."""
    has_prefix = any(len(row.prefix_LD) for row in work.rows)
    return Span(work.first_block if has_prefix else work.span.start, work.span.end)


def missing_bytes(checkpoint: Checkpoint, work: HopWork) -> int:
    """Bytes of weights that a recomputation would have to download."""
    if not any(checkpoint.download_sizes(checkpoint.tensors).values()):
        return 0
    skeleton = Skeleton(checkpoint)
    names = skeleton.block_names(_recomputed_span(work))
    return sum(checkpoint.download_sizes(skeleton.source_names(names)).values())


def recompute(
    checkpoint: Checkpoint,
    work: HopWork,
    adapter: PeftFolder | None = None,
    *,
    by_token: bool = False,
    is_perturbed: bool = False,
) -> Recomputation:
    """Compute the outputs of each row in the hop's own kind of computation, with the adapter.

    By one prefill, or `by_token`, which rounds otherwise and takes as long as a session; from the
    inputs as they are or, `is_perturbed`, as `perturb` changes them. Blocks the thread. Raises
    what `load_blocks` and `load_adapter` raise, and `NotAuditedError` for a quantization that is
    unknown here.
    """
    declared = work.computation
    if declared.weights not in get_args(QuantType):
        raise NotAuditedError(f"quantization {declared.quantization!r} is unknown here")
    dtype = DTYPES[declared.dtype]
    vary = perturb if is_perturbed else lambda values_LD: values_LD
    hidden = [vary(row.prefix_LD.to(dtype)) for row in work.rows]
    undecided = [torch.zeros(len(row.prefix_LD) + len(row.inputs_LD)).bool() for row in work.rows]
    own, before = work.span, Span(_recomputed_span(work).start, work.span.start)
    for span in (*split_runs(checkpoint, before, dtype), *split_runs(checkpoint, own, dtype)):
        if span.start == own.start:
            hidden = [
                torch.cat([prefix_LD, vary(row.inputs_LD.to(dtype))])
                for prefix_LD, row in zip(hidden, work.rows, strict=True)
            ]
        for row, (hidden_LD, tied_L) in enumerate(
            run_blocks(
                checkpoint,
                span,
                hidden,
                dtype=dtype,
                quant_type=cast(QuantType, declared.weights),
                cache_dtype=declared.cache_dtype,
                adapter=adapter,
                by_token=by_token,
            )
        ):
            hidden[row] = hidden_LD
            if tied_L is not None:
                if span.end == own.end:
                    undecided[row] |= tied_L
                elif tied_L.any():
                    # In later blocks, the tokens after it attend to it.
                    undecided[row][int(tied_L.nonzero()[0]) :] = True
    return Recomputation(
        [output_LD[list(row.positions)] for row, output_LD in zip(work.rows, hidden, strict=True)],
        [each_L[list(row.positions)] for row, each_L in zip(work.rows, undecided, strict=True)],
    )
