"""Tasks of lm-evaluation-harness with results per item, for paired tests between runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import ConfigError, UnsupportedFeatureError
from nesa_node.evaluation.paired_tests import mcnemar, mean_and_error, paired_t

PAPER_TABLE_1_TASKS = (
    "hellaswag",
    "lambada_openai",
    "bigbench_causal_judgment_multiple_choice",
    "bigbench_disambiguation_qa_multiple_choice",
    "bigbench_logical_deduction_multiple_choice",
)
"""The tasks of table 1 of the Nesa paper."""

_PREFERRED_METRICS = ("acc_norm", "acc", "exact_match")


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One value per item of the reported metric: `acc_norm`, else `acc`, else `exact_match`."""

    metric: str
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def standard_error(self) -> float:
        """s / sqrt(n), as the harness states for means."""
        return mean_and_error(self.values)[1]

    def p_value(self, baseline: TaskResult) -> float:
        """McNemar's test if all values are 0 or 1, else a paired t-test."""
        if set(self.values) | set(baseline.values) <= {0.0, 1.0}:
            return mcnemar(
                [value == 1 for value in self.values], [value == 1 for value in baseline.values]
            )
        return paired_t(self.values, baseline.values).p_value


class HarnessTasks:
    """Named tasks of the harness; datasets come from the hub, unless a task names local files."""

    def __init__(
        self, names: Sequence[str], *, folder: Path | None = None, limit: int | None = None
    ) -> None:
        """`folder`: YAML files of further tasks. `limit`: most items per task.

        Raises `UnsupportedFeatureError` without the harness, `ConfigError` for an unknown name.
        """
        require_harness()
        from lm_eval.tasks import TaskManager

        self._names = tuple(names)
        self._limit = limit
        own = None if folder is None else str(folder)
        # The harness reads thousands of files to index its own tasks: only if needed.
        self._manager: Any = own and TaskManager(include_path=own, include_defaults=False)
        if not own or self._unknown_names():
            self._manager = TaskManager(include_path=own)
        if unknown := self._unknown_names():
            raise ConfigError(f"--tasks {unknown[0]}: lm-evaluation-harness has no such task")

    def _unknown_names(self) -> list[str]:
        return [name for name in self._names if not self._manager.match_tasks([name])]

    def measure(
        self, model: DistributedModelForCausalLM, tokenizer: PreTrainedTokenizerBase
    ) -> dict[str, TaskResult]:
        """Run the tasks. Raises as sessions do, and `ConfigError` if a dataset is unavailable."""
        from lm_eval import simple_evaluate

        from nesa_node.evaluation.harness import HarnessModel

        try:
            told: Any = simple_evaluate(
                model=HarnessModel(model, tokenizer),
                tasks=list(self._names),
                task_manager=self._manager,
                limit=self._limit,
                bootstrap_iters=0,
            )
        except OSError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"--tasks: a dataset cannot be loaded: {reason}") from error
        return {name: _make_result(name, items) for name, items in told["samples"].items()}


@functools.cache
def require_harness() -> None:
    """Raise `UnsupportedFeatureError` if lm-evaluation-harness is not installed."""
    import nesa_node.evaluation.harness  # noqa: F401


def _make_result(name: str, items: Sequence[Mapping[str, Any]]) -> TaskResult:
    # There is one entry per item and filter; the first filter does not change answers.
    first = items[0].get("filter")
    own = sorted(
        (item for item in items if item.get("filter") == first), key=lambda item: item["doc_id"]
    )
    for metric in _PREFERRED_METRICS:
        if metric in own[0]:
            return TaskResult(metric, tuple(float(item[metric]) for item in own))
    raise UnsupportedFeatureError(
        f"--tasks {name}: none of its metrics is a mean over items "
        f"({', '.join(_PREFERRED_METRICS)})"
    )
