"""Progress and result of a fine-tuning, on standard error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nesa_node.core.errors import ConfigError, is_installed

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from nesa_node.client.training.finetuning import StepReport, TrainingSummary

PLAIN_REPORT_STEPS = 10
"""Steps between two lines where no terminal shows the progress."""


class TrainingDisplay:
    """Progress on stderr: a bar in a terminal, else a line every `PLAIN_REPORT_STEPS` steps."""

    def __init__(self, steps: int, applied: int) -> None:
        self._steps = steps
        self._applied = applied
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> TrainingDisplay:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=self._steps, completed=self._applied)
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, report: StepReport) -> None:
        result = report.result
        line = (
            f"loss {result.loss:.4f}, rate {result.learning_rate:.2g}, "
            f"{report.tokens_per_s:.0f} tokens/s"
        )
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=result.step, description=line)
            if report.eval_loss is not None:
                text = f"step {result.step}: validation loss {report.eval_loss:.4f}"
                self._progress.console.print(text)
            return
        is_told = result.step % PLAIN_REPORT_STEPS == 0 or result.step == report.total_steps
        if not (is_told or report.eval_loss is not None):
            return
        nodes = ", ".join(f"…{peer[-6:]} {spent:.2f} s" for peer, spent in report.node_s.items())
        check = "" if report.eval_loss is None else f", validation loss {report.eval_loss:.4f}"
        print(
            f"step {result.step}/{report.total_steps}: {line}{check}, {report.left_s:.0f} s left "
            f"({nodes})",
            file=sys.stderr,
            flush=True,
        )


class TensorBoardLog:
    """Event files for TensorBoard, with a point for each step."""

    def __init__(self, folder: Path, applied: int) -> None:
        """Points after step `applied` of an earlier run, which are made again, are dropped.

        Raises `ConfigError` if tensorboardX is not installed.
        """
        require_tensorboard()
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=applied + 1)

    def __enter__(self) -> TensorBoardLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(self, report: StepReport) -> None:
        result = report.result
        values = {
            "loss": result.loss,
            "gradient_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "tokens_per_s": report.tokens_per_s,
        }
        if report.eval_loss is not None:
            values["validation_loss"] = report.eval_loss
        for name, value in values.items():
            self._writer.add_scalar(name, value, result.step)


def require_tensorboard() -> None:
    """Raise `ConfigError` that says what to install for `TensorBoardLog`."""
    if not is_installed("tensorboardX"):
        raise ConfigError(
            "--tensorboard needs tensorboardX: pip install 'nesa-node[tensorboard]', or "
            "'.[tensorboard]' in a clone"
        )


def print_training_summary(summary: TrainingSummary, output: Path, *, is_model: bool) -> None:
    ended = "stopped early" if summary.stopped_early else "done"
    check = "" if summary.eval_loss is None else f", validation loss {summary.eval_loss:.4f}"
    rate = summary.tokens / summary.seconds if summary.seconds else 0.0
    print(
        f"[{ended} after {summary.steps} steps: loss {summary.loss:.4f}{check}; "
        f"{summary.tokens} tokens in {summary.seconds:.0f} s ({rate:.0f} tokens/s), "
        f"{summary.recoveries} times a node was replaced]",
        file=sys.stderr,
    )
    if is_model:
        print(f"model in {output} (serve it with nesa-node run {output})")
    else:
        print(f"adapter in {output} (load it with peft.PeftModel.from_pretrained)")
