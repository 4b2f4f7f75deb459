"""Loss curves, from logs as `nesa-node finetune` writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nesa_node.client.training.finetuning import LOG_NAME, StepReport, TrainingLog
from nesa_node.client.training.finetuning_session import StepResult
from nesa_node.dashboard import training_curves
from nesa_node.dashboard.training_curves import MAX_POINTS, TrainingCurves, summarize_log


def write_steps(folder: Path, steps: range, *, eval_every: int = 10) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    log = TrainingLog(folder / LOG_NAME, steps.start - 1)
    for step in steps:
        result = StepResult(
            step=step,
            loss=4 / step,
            grad_norm=1.0,
            learning_rate=1e-3,
            num_tokens=100,
            num_targets=50,
            seconds=0.1,
        )
        log.write(
            StepReport(
                result=result,
                total_steps=1000,
                tokens_per_s=1000.0,
                left_s=1.0,
                eval_loss=5 / step if step % eval_every == 0 else None,
                node_s={},
            )
        )


def test_a_training_is_shown_as_it_goes(tmp_path: Path) -> None:
    assert training_curves.LOG_NAME == LOG_NAME
    folder = tmp_path / "polite"
    curves = TrainingCurves([folder, tmp_path / "nothing"])
    assert curves.read() == {}
    write_steps(folder, range(1, 21))
    [(name, found)] = curves.read().items()
    assert name == str(folder)
    assert (found["name"], found["step"], found["loss"]) == ("polite", 20, 0.2)
    assert found["steps"] == list(range(1, 21))
    assert found["losses"] == [round(4 / step, 5) for step in range(1, 21)]
    assert [value for value in found["eval_losses"] if value is not None] == [0.5, 0.25]
    write_steps(folder, range(16, 26))  # from a checkpoint at step 15
    [again] = curves.read().values()
    assert again["steps"] == list(range(1, 26))


def test_many_steps_become_as_many_points_as_are_drawn() -> None:
    lines = [
        {"step": step, "loss": float(step), "learning_rate": 1e-3, "at": 1.0, "eval_loss": None}
        for step in range(1, 10 * MAX_POINTS + 2)
    ]
    found = summarize_log("x", "\n".join(map(json.dumps, lines)))
    assert len(found["steps"]) == len(found["losses"]) == len(found["eval_losses"]) <= MAX_POINTS
    assert found["steps"][-1] == found["step"] == 10 * MAX_POINTS + 1
    assert found["losses"][0] == pytest.approx(sum(range(1, 12)) / 11)
    assert set(found["eval_losses"]) == {None}


def test_lines_that_are_no_steps_are_left_out(tmp_path: Path) -> None:
    good = {"step": 1, "loss": 2.5, "learning_rate": 1e-3, "at": 1.0, "eval_loss": None}
    bad = ["{", "[]", "null", '{"step": 2}', json.dumps(good | {"loss": "x"}), "\x00"]
    found = summarize_log("x", "\n".join([*bad, json.dumps(good), *bad]))
    assert found["steps"] == [1]
    assert summarize_log("x", "\n".join(bad)) == {}
    nan = summarize_log("x", json.dumps(good | {"loss": float("nan")}))
    assert nan["losses"] == [None]
    (tmp_path / LOG_NAME).write_bytes(b"\xff\xfe")
    assert TrainingCurves([tmp_path]).read() == {}
