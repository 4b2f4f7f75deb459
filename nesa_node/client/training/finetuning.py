"""A whole fine-tuning: steps by a plan, validation, early stop, and a log that is continued."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from nesa_node.client.training.checkpoint_file import write_atomically
from nesa_node.client.training.data.batches import BatchOrder, MicroBatchData
from nesa_node.client.training.data.examples import TrainingExample
from nesa_node.client.training.finetuning_session import FinetuningSession, StepResult
from nesa_node.core.errors import ConfigError

ScheduleName = Literal["constant", "linear", "cosine"]
LOG_NAME = "log.jsonl"
CHECKPOINT_NAME = "checkpoint.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """How long to train, and at which learning rate."""

    steps: int
    learning_rate: float = 2e-4
    schedule: ScheduleName = "cosine"
    """What the rate does after the warm-up: it stays, or falls to 0 with the last step."""
    warmup_steps: int = 0
    """Steps in which the rate rises linearly."""
    eval_every: int = 0
    """Steps between two validations; 0: after the last one only."""
    patience: int = 0
    """Validations in a row without a lower loss that end the training; 0: none do."""

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1, got {self.steps}")
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ConfigError(f"schedule {self.schedule!r}: use constant, linear or cosine")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ConfigError(f"warmup_steps must be from 0 to {self.steps}")
        if min(self.eval_every, self.patience) < 0:
            raise ConfigError("eval_every and patience must not be negative")

    def rate_of(self, step: int) -> float:
        """Learning rate of step `step`, counted from 0, as transformers' schedules give it."""
        if step < self.warmup_steps:
            return self.learning_rate * step / max(self.warmup_steps, 1)
        if self.schedule == "constant":
            return self.learning_rate
        done = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        if self.schedule == "linear":
            return self.learning_rate * (1 - done)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What happened in a step, and how far the training is."""

    result: StepResult
    total_steps: int
    tokens_per_s: float
    """Mean of this run."""
    left_s: float
    eval_loss: float | None
    """Where this step ended in a validation."""
    node_s: dict[str, float]
    """Seconds that the step waited for each node, by peer id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSummary:
    steps: int
    loss: float
    """Of the last step."""
    eval_loss: float | None
    """The last validation's."""
    tokens: int
    """Of this run."""
    seconds: float
    stopped_early: bool
    recoveries: int
    """Losses of nodes that the training survived in this run."""


def digest_examples(examples: Sequence[TrainingExample], *parts: object) -> str:
    """Digest of examples and of what else decides the order of micro-batches."""
    digest = hashlib.sha256(repr(parts).encode())
    for example in examples:
        digest.update(len(example).to_bytes(8, "little"))
        digest.update(example.ids.tobytes())
        digest.update(example.labels.tobytes())
    return digest.hexdigest()


class TrainingLog:
    """Lines of JSON, one for each step. Steps that a restart repeats are written once."""

    def __init__(self, path: Path, applied: int) -> None:
        """Keep the lines of the first `applied` steps. Raises `OSError`."""
        self._path = path
        kept = [line for line in self._read() if _step_of(line) <= applied]
        write_atomically(path, "".join(f"{line}\n" for line in kept))
        self.entries = [json.loads(line) for line in kept]

    def _read(self) -> Iterator[str]:
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                if _step_of(line):
                    yield line

    def write(self, report: StepReport) -> None:
        result = report.result
        entry = asdict(result) | {"eval_loss": report.eval_loss, "at": time.time()}
        self.entries.append(entry)
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _step_of(line: str) -> int:
    """The step of a line; 0 if a crash has cut it."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0


def run_training(
    session: FinetuningSession,
    order: BatchOrder,
    plan: TrainingPlan,
    *,
    validation: Sequence[MicroBatchData] = (),
    log: TrainingLog,
    report: Callable[[StepReport], None] = lambda _: None,
) -> TrainingSummary:
    """Train from the session's step on to the end of the plan, or until validation stops it.

    Raises what the session raises, and `OSError`.
    """
    started, tokens, first = time.monotonic(), 0, session.applied
    losses = [entry["eval_loss"] for entry in log.entries if entry["eval_loss"] is not None]
    last_loss = log.entries[-1]["loss"] if log.entries else math.nan
    stopped = _has_stalled(losses, plan.patience)
    waited = dict(session.chain.seconds_by_peer)
    while session.applied < plan.steps and not stopped:
        step = session.applied
        result = session.step(order.step(step), learning_rate=plan.rate_of(step))
        last_loss, tokens = result.loss, tokens + result.num_tokens
        eval_loss = None
        is_last = session.applied == plan.steps
        if validation and (is_last or (plan.eval_every and not result.step % plan.eval_every)):
            eval_loss = session.evaluate(validation)
            losses.append(eval_loss)
            stopped = _has_stalled(losses, plan.patience)
        spent_s = time.monotonic() - started
        now = session.chain.seconds_by_peer
        told = StepReport(
            result=result,
            total_steps=plan.steps,
            tokens_per_s=tokens / spent_s,
            left_s=(plan.steps - session.applied) * spent_s / (session.applied - first),
            eval_loss=eval_loss,
            node_s={str(peer): now[peer] - waited.get(peer, 0.0) for peer in now},
        )
        waited = dict(now)
        log.write(told)
        report(told)
    if session.applied > first:
        session.checkpoint()
    return TrainingSummary(
        steps=session.applied,
        loss=last_loss,
        eval_loss=losses[-1] if losses else None,
        tokens=tokens,
        seconds=time.monotonic() - started,
        stopped_early=stopped and session.applied < plan.steps,
        recoveries=session.chain.recoveries,
    )


def _has_stalled(losses: Sequence[float], patience: int) -> bool:
    """Whether the last `patience` validations were no better than the best one before."""
    if not patience or len(losses) <= patience:
        return False
    return min(losses[-patience:]) >= min(losses[:-patience])
