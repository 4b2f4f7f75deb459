"""Results of an evaluation: its cells, their models, and rows as text and as JSON.

A cell is one quantization of the weights with one codec of the wire; its model runs in this process
with a swarm's code path, and its results are compared with the baseline's.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, TextIO, get_args

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from nesa_node.client.model.auto import build_model
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.layers import LocalConnection
from nesa_node.client.session.base import SwarmConnection
from nesa_node.compression.codecs import FAMILIES
from nesa_node.compression.tensors import encode
from nesa_node.core.errors import ConfigError, ProtocolError
from nesa_node.core.ids import split_evenly
from nesa_node.core.settings.choices import CacheDtype, ClientQuantType, QuantType
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.evaluation.scoring import Perplexity, mcnemar, measure_perplexity, paired_t
from nesa_node.evaluation.tasks import (
    Accuracy,
    ChoiceResult,
    HarnessTasks,
    MultipleChoiceItem,
    TaskResult,
    measure_choices,
)
from nesa_node.verification.distributions import ComputeLogits

WEIGHTS = ("none", "int8", "nf4")
"""What is measured by default."""
WIRE_CODECS = ("none", "blockwise8@2:64:8", "int4@2:32:48")
WEIGHTS_AS_SERVED = "as served"
"""Name for the weights of a live swarm, as its nodes hold them."""


@dataclass(frozen=True, slots=True)
class Cell:
    weights: str
    wire: str

    def __str__(self) -> str:
        return f"weights {self.weights}, wire {self.wire}"


def make_cells(weights: Iterable[str], wire: Iterable[str]) -> list[Cell]:
    """All combinations, grouped by weights; the first is the unquantized baseline.

    The baseline is included even if it is not among the arguments.
    """
    baseline = "none"
    rows = list(dict.fromkeys(weights))
    baseline_weights = WEIGHTS_AS_SERVED if WEIGHTS_AS_SERVED in rows else baseline
    first = Cell(baseline_weights, baseline)
    ordered = sorted(product(rows, dict.fromkeys(wire)), key=lambda pair: pair[0] != first.weights)
    return list(dict.fromkeys([first, *(Cell(*pair) for pair in ordered)]))


def check_weights(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a name that is not a `QuantType`."""
    known = get_args(QuantType)
    for name in names:
        if name not in known:
            raise ConfigError(f"--weights {name}: choose among {', '.join(known)}")


def check_wire(names: Sequence[str], *, hidden_size: int) -> None:
    """Raise `ConfigError` for a codec that is unknown or does not fit the model's hidden size."""
    for name in names:
        family = name.partition(":")[0].partition("@")[0]
        if family not in FAMILIES:
            raise ConfigError(
                f"--wire {name}: unknown codec; choose among {', '.join(FAMILIES)}, with "
                "parameters as in int8:16:8"
            )
        try:
            encode(torch.zeros(1, hidden_size), codec=name)
        except ProtocolError as error:
            raise ConfigError(f"--wire {name}: {error}") from error


class LocalModels:
    """The blocks as `nodes` spans, in memory with one quantization of the weights at a time.

    Embedding and head, which clients hold, are held in `client_quant_type`, KV caches in
    `cache_dtype`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        nodes: int,
        dtype: torch.dtype,
        device: torch.device,
        client_quant_type: ClientQuantType = "none",
        cache_dtype: CacheDtype = "auto",
    ) -> None:
        self._checkpoint = checkpoint
        self._spans = split_evenly(checkpoint.num_blocks, nodes)
        self._dtype = dtype
        self._device = device
        self._client_quant_type = client_quant_type
        self._cache_dtype: CacheDtype = cache_dtype
        self._weights: str | None = None
        self._parts: list[ModelBlocks] = []

    @contextmanager
    def open(self, cell: Cell) -> Iterator[DistributedModelForCausalLM]:
        """The model with the cell's weights and wire codec; close it before opening the next.

        Raises as `load_blocks` does.
        """
        connection = LocalConnection(self._load(cell.weights), codec=cell.wire)

        @asynccontextmanager
        async def connect(_: ComputeLogits) -> AsyncIterator[SwarmConnection]:
            yield connection

        try:
            with build_model(
                self._checkpoint,
                connect,
                dtype=self._dtype,
                device=self._device,
                quant_type=self._client_quant_type,
            ) as model:
                yield model
        finally:
            connection.close()

    def _load(self, weights: str) -> list[ModelBlocks]:
        if weights != self._weights:
            # Freed before loading, since memory may not suffice for two models.
            self._parts, self._weights = [], None
            options: dict[str, Any] = {} if weights == "none" else {"quant_type": weights}
            self._parts = [
                load_blocks(
                    self._checkpoint,
                    span,
                    dtype=self._dtype,
                    device=self._device,
                    cache_dtype=self._cache_dtype,
                    **options,
                )
                for span in self._spans
            ]
            self._weights = weights
        return self._parts


OpenModel = Callable[[Cell], AbstractContextManager[DistributedModelForCausalLM]]


@dataclass(frozen=True, slots=True)
class EvaluationSample:
    """Data on which every cell is measured; measures without ids, items or tasks are skipped."""

    ids: Sequence[int]
    context: int
    stride: int
    items: Sequence[MultipleChoiceItem]
    tasks: HarnessTasks | None = None


@dataclass(frozen=True, slots=True)
class CellResult:
    cell: Cell
    perplexity: Perplexity | None
    choices: ChoiceResult | None
    tasks: Mapping[str, TaskResult]
    seconds: float


@dataclass(frozen=True, slots=True)
class BaselineChange:
    """Changes of a row against the baseline, with the p-values of paired tests.

    `perplexity` is the relative change exp(d) - 1, where d is the mean difference of the blocks'
    negative log-likelihoods; its error is (1 + change) times that of d. Accuracies: McNemar's test.
    """

    perplexity: float | None = None
    perplexity_error: float | None = None
    perplexity_p: float | None = None
    plain_p: float | None = None
    normalised_p: float | None = None
    tasks_p: Mapping[str, float] = field(default_factory=dict)


def measure_cells(
    open_model: OpenModel,
    tokenizer: PreTrainedTokenizerBase,
    cells: Sequence[Cell],
    sample: EvaluationSample,
) -> Iterator[CellResult]:
    """Measure the cells in order, one row each. Raises as models and sessions do."""
    for cell in cells:
        started = time.perf_counter()
        perplexity, choices = None, None
        tasks: Mapping[str, TaskResult] = {}
        with open_model(cell) as model:
            # Tasks run first, so that missing datasets fail early.
            if sample.tasks is not None:
                tasks = sample.tasks.measure(model, tokenizer)
            if sample.ids:
                perplexity = measure_perplexity(
                    model, sample.ids, context=sample.context, stride=sample.stride
                )
            if sample.items:
                choices = measure_choices(model, tokenizer, sample.items)
        yield CellResult(cell, perplexity, choices, tasks, time.perf_counter() - started)


def compare_rows(row: CellResult, baseline: CellResult) -> BaselineChange:
    """`row` against a baseline that was measured on the same sample."""
    change, error, change_p, plain_p, normalised_p = None, None, None, None, None
    if row.perplexity is not None and baseline.perplexity is not None:
        difference = paired_t(row.perplexity.block_nll, baseline.perplexity.block_nll)
        ratio = math.exp(row.perplexity.mean_nll - baseline.perplexity.mean_nll)
        change, error = ratio - 1, ratio * difference.standard_error
        change_p = difference.p_value
    if row.choices is not None and baseline.choices is not None:
        plain_p = mcnemar(row.choices.plain.right, baseline.choices.plain.right)
        normalised_p = mcnemar(row.choices.normalised.right, baseline.choices.normalised.right)
    tasks = {name: mine.p_value(baseline.tasks[name]) for name, mine in row.tasks.items()}
    return BaselineChange(change, error, change_p, plain_p, normalised_p, tasks)


PIPE_COLUMNS = 120
"""Columns of the table if the output is not a terminal."""
_PACKAGES = ("nesa-node", "torch", "transformers")


def print_rows(rows: Sequence[CellResult], *, title: str, unquantized: str, out: TextIO) -> None:
    """Print the rows as a table; the first is the baseline.

    `unquantized`: label of weights that are not quantized, their data type.
    """
    console = Console(file=out, width=None if out.isatty() else PIPE_COLUMNS)
    table = Table(title=title, title_justify="left")
    table.add_column("weights")
    table.add_column("wire", no_wrap=True)
    for heading in _headings(rows[0]):
        table.add_column(heading, justify="right")
    for row in rows:
        weights = unquantized if row.cell.weights == "none" else row.cell.weights
        change = BaselineChange() if row is rows[0] else compare_rows(row, rows[0])
        table.add_row(weights, row.cell.wire, *_format_results(row, change))
    console.print(table)


def write_rows(rows: Sequence[CellResult], path: Path, *, options: Mapping[str, object]) -> None:
    """Write a JSON array with one object per row and line, with options and machine.

    Raises `OSError`.
    """
    about = {
        "benchmark": "eval",
        "measured_at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "machine": describe_machine(),
        "options": dict(options),
    }
    lines = [json.dumps(about | describe_row(row, compare_rows(row, rows[0]))) for row in rows]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def describe_row(row: CellResult, change: BaselineChange) -> dict[str, Any]:
    """A row with its change, and the values per item that further paired tests need."""
    told: dict[str, Any] = {
        "weights": row.cell.weights,
        "wire": row.cell.wire,
        "seconds": round(row.seconds, 1),
    }
    if row.perplexity is not None:
        told["perplexity"] = {
            "value": row.perplexity.value,
            "standard_error": row.perplexity.standard_error,
            "tokens": row.perplexity.tokens,
            "change": change.perplexity,
            "change_standard_error": change.perplexity_error,
            "p_value": change.perplexity_p,
            "block_nll": [round(value, 6) for value in row.perplexity.block_nll],
        }
    if row.choices is not None:
        told["acc"] = _describe_accuracy(row.choices.plain, change.plain_p)
        told["acc_norm"] = _describe_accuracy(row.choices.normalised, change.normalised_p)
    for name, task in row.tasks.items():
        told.setdefault("tasks", {})[name] = {
            "metric": task.metric,
            "value": task.value,
            "standard_error": task.standard_error,
            "p_value": change.tasks_p[name],
            "values": task.values,
        }
    return told


def _describe_accuracy(accuracy: Accuracy, p_value: float | None) -> dict[str, Any]:
    return {
        "value": accuracy.value,
        "standard_error": accuracy.standard_error,
        "items": len(accuracy.right),
        "p_value": p_value,
        "right": "".join("01"[answer] for answer in accuracy.right),
    }


def _headings(row: CellResult) -> list[str]:
    headings = []
    if row.perplexity is not None:
        headings += ["perplexity", "change", "p"]
    if row.choices is not None:
        headings += ["acc_norm", "p", "acc", "p"]
    for name, task in row.tasks.items():
        headings += [f"{name}\n{task.metric}", "p"]
    return headings


def _format_results(row: CellResult, change: BaselineChange) -> list[str]:
    figures = []
    if row.perplexity is not None:
        figures.append(f"{row.perplexity.value:.2f} ± {row.perplexity.standard_error:.2f}")
        ratio, error = change.perplexity, change.perplexity_error
        figures.append("" if ratio is None or error is None else f"{ratio:+.2%} ± {error:.2%}")
        figures.append(_format_p(change.perplexity_p))
    shares: list[tuple[Accuracy | TaskResult, float | None]] = []
    if row.choices is not None:
        shares.append((row.choices.normalised, change.normalised_p))
        shares.append((row.choices.plain, change.plain_p))
    shares += [(task, change.tasks_p.get(name)) for name, task in row.tasks.items()]
    for share, p_value in shares:
        figures.append(f"{share.value:.3f} ± {share.standard_error:.3f}")
        figures.append(_format_p(p_value))
    return figures


def _format_p(value: float | None) -> str:
    if value is None:
        return ""
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _processor_name() -> str:
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    named = re.search(r"^model name\s*:\s*(.+)$", facts, flags=re.MULTILINE)
    return named[1] if named else platform.machine()


def describe_machine() -> dict[str, object]:
    return {
        "processor": _processor_name(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }
