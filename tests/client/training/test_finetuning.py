"""Plans of a training, and its log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from nesa_node.client.training.finetuning import (
    ScheduleName,
    StepReport,
    TrainingLog,
    TrainingPlan,
    _has_stalled,
)
from nesa_node.client.training.finetuning_session import StepResult
from nesa_node.core.errors import ConfigError


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rates_are_those_of_transformers(schedule: ScheduleName) -> None:
    plan = TrainingPlan(steps=40, learning_rate=0.3, schedule=schedule, warmup_steps=5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    theirs: Any = get_scheduler(name, optimizer, num_warmup_steps=5, num_training_steps=40)
    for step in range(40):
        assert plan.rate_of(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"warmup_steps": 11}, {"eval_every": -1}, {"schedule": "none"}]
)
def test_a_plan_that_cannot_be_followed_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TrainingPlan(**{"steps": 10, **wrong})


def test_training_stops_after_as_many_validations_without_progress() -> None:
    assert not _has_stalled([3.0, 2.0, 2.1], 2)
    assert _has_stalled([3.0, 2.0, 2.1, 2.0], 2)
    assert not _has_stalled([3.0, 2.0, 2.1, 1.9], 2)
    assert not _has_stalled([1.0, 2.0, 3.0], 0)


def make_report(step: int) -> StepReport:
    result = StepResult(
        step=step,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=0.1,
        num_tokens=1,
        num_targets=1,
        seconds=1,
    )
    return StepReport(
        result=result, total_steps=9, tokens_per_s=1, left_s=1, eval_loss=None, node_s={}
    )


def test_steps_that_a_restart_repeats_are_logged_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = TrainingLog(path, 0)
    for step in range(1, 6):
        log.write(make_report(step))
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # the process ended here
    again = TrainingLog(path, 3)
    assert [entry["step"] for entry in again.entries] == [1, 2, 3]
    again.write(make_report(4))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
