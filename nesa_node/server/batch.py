"""Queued steps of one session as jobs for the device, and their results as outputs per step.

T packed tokens, L tokens of one row, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nesa_node.swarm.messages import RowSlice

MAX_JOB_TOKENS = 256
"""Tokens that one job of the device's thread runs; a long prefill lets others in between."""


@dataclass(frozen=True, slots=True)
class RowChunk:
    row: int
    hidden_LD: torch.Tensor


class Batch:
    """Consecutive steps merged row by row: a replay of many small steps runs as a few jobs."""

    def __init__(self, steps: Sequence[tuple[tuple[RowSlice, ...], torch.Tensor]]) -> None:
        self._steps = [slices for slices, _ in steps]
        self._starts: dict[int, int] = {}
        self._outputs: dict[int, list[torch.Tensor]] = {}
        parts: dict[int, list[torch.Tensor]] = {}
        for slices, hidden_TD in steps:
            pieces = torch.split(hidden_TD, [part.count for part in slices])
            for part, piece_LD in zip(slices, pieces, strict=True):
                self._starts.setdefault(part.row, part.position)
                parts.setdefault(part.row, []).append(piece_LD)
        self.jobs = _cut_to_size({row: _joined(pieces) for row, pieces in parts.items()})

    def done(self, job: Sequence[RowChunk], outputs: Sequence[torch.Tensor]) -> None:
        """Take the outputs [L, D] of a job's chunks. Jobs are done in their order."""
        for chunk, output_LD in zip(job, outputs, strict=True):
            self._outputs.setdefault(chunk.row, []).append(output_LD)

    def results(self) -> list[torch.Tensor]:
        """The outputs [T, D] of every step, packed like its input. All jobs must be done."""
        rows = {row: _joined(pieces) for row, pieces in self._outputs.items()}
        return [self._pick(slices, rows) for slices in self._steps]

    def _pick(self, slices: Sequence[RowSlice], rows: dict[int, torch.Tensor]) -> torch.Tensor:
        parts = []
        for part in slices:
            at = part.position - self._starts[part.row]
            parts.append(rows[part.row][at : at + part.count])
        return _joined(parts)


def _cut_to_size(rows: dict[int, torch.Tensor]) -> list[list[RowChunk]]:
    jobs: list[list[RowChunk]] = []
    room = 0
    for row, hidden_LD in rows.items():
        for chunk_LD in torch.split(hidden_LD, MAX_JOB_TOKENS):
            if len(chunk_LD) > room:
                jobs.append([])
                room = MAX_JOB_TOKENS
            jobs[-1].append(RowChunk(row, chunk_LD))
            room -= len(chunk_LD)
    return jobs


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
