"""Rows of the result table: the results of each cell, compared with the baseline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from nesa_node.client.causal_lm import DistributedModelForCausalLM
from nesa_node.evaluation.cells import Cell
from nesa_node.evaluation.choices import ChoiceResult, Item, measure_choices
from nesa_node.evaluation.paired import mcnemar, paired_t
from nesa_node.evaluation.perplexity import Perplexity, measure_perplexity
from nesa_node.evaluation.tasks import TaskResult, Tasks

OpenModel = Callable[[Cell], AbstractContextManager[DistributedModelForCausalLM]]


@dataclass(frozen=True, slots=True)
class Sample:
    """Data on which every cell is measured; measures without ids, items or tasks are skipped."""

    ids: Sequence[int]
    context: int
    stride: int
    items: Sequence[Item]
    tasks: Tasks | None = None


@dataclass(frozen=True, slots=True)
class Row:
    cell: Cell
    perplexity: Perplexity | None
    choices: ChoiceResult | None
    tasks: Mapping[str, TaskResult]
    seconds: float


@dataclass(frozen=True, slots=True)
class Change:
    """Changes of a row against the baseline, with the p-values of paired tests.

    `perplexity` is the relative change exp(d) - 1, where d is the mean difference of the blocks'
    negative log-likelihoods; its error is (1 + change) times that of d. Accuracies: McNemar's test.
    """

    perplexity: float | None
    perplexity_error: float | None
    perplexity_p: float | None
    plain_p: float | None
    normalised_p: float | None
    tasks_p: Mapping[str, float]


def measure(
    open_model: OpenModel,
    tokenizer: PreTrainedTokenizerBase,
    cells: Sequence[Cell],
    sample: Sample,
) -> Iterator[Row]:
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
        yield Row(cell, perplexity, choices, tasks, time.perf_counter() - started)


def compare(row: Row, baseline: Row) -> Change:
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
    return Change(change, error, change_p, plain_p, normalised_p, tasks)
