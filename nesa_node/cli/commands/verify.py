"""`nesa-node verify`: what was answered or kept, computed again.

An answer of a gateway is compared token by token, a kept session's hidden states node by node.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from nesa_node.cli.flags import COMPUTE, SAMPLING, Flags, JsonFlag, load_command_config
from nesa_node.cli.process_setup import exit_on_interrupt
from nesa_node.core.errors import ConfigError
from nesa_node.core.logging import escape_lines
from nesa_node.core.wait_tracking import track_wait

if TYPE_CHECKING:
    from nesa_node.api.verification.saved_answer import SavedAnswer
    from nesa_node.api.verification.verdict import AllowedErrors, AnswerReport
    from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
    from nesa_node.core.settings.choices import CacheDtype
    from nesa_node.core.settings.models import ClientConfig
    from nesa_node.engine.weights.checkpoint import Checkpoint

MAX_SHOWN_DIFFERENCES = 20


def verify(
    answer: Annotated[
        Path,
        Parameter(
            help='A file: {"request": {...}, "response": {...}}, or the response alone, as JSON or '
            "as an event stream. Or a session of --keep-session: .safetensors."
        ),
    ],
    model: Annotated[
        str | None,
        Parameter(
            help="A local folder, or the name of a model on the hub. [default: that of the request]"
        ),
    ] = None,
    /,
    *,
    request: Annotated[
        Path | None, Parameter(help="File of the request, where the answer's has none.")
    ] = None,
    weights: Annotated[
        Literal["none", "int8", "nf4", "llm_int8"],
        Parameter(group=COMPUTE, help="Quantization that the answer is said to have."),
    ] = "none",
    cache_dtype: Annotated[
        Literal["auto", "int8"],
        Parameter(group=COMPUTE, help="What the answer's nodes are said to hold KV caches in."),
    ] = "auto",
    defaults: Annotated[
        Literal["model", "openai"],
        Parameter(group=SAMPLING, help="The gateway's --generation-config."),
    ] = "model",
    as_json: JsonFlag = False,
    flags: Flags["ClientConfig"] | None = None,
) -> int:
    """Compute an answer of a gateway again, and compare each token with what the model gives.

    With this machine's own weights, or by a swarm with --initial-peers. Of a kept session the work
    of its audited nodes is audited again. The exit code is 1 where something else was given.
    """
    from nesa_node.core.settings.declaration import user_path
    from nesa_node.core.settings.models import ClientConfig

    config = load_command_config(ClientConfig, flags, model=model)
    with exit_on_interrupt():
        from nesa_node.client.verification.kept_session import is_kept_session
    if is_kept_session(answer):
        with exit_on_interrupt():
            return asyncio.run(_audit_session(config, user_path(answer), as_json=as_json))
    with exit_on_interrupt():
        from nesa_node.api.verification.saved_answer import read_answer

    saved = read_answer(user_path(answer), None if request is None else user_path(request))
    name = config.model or saved.request.model or saved.model
    if name is None:
        raise ConfigError("neither request nor answer name a model: give MODEL after the file")
    config = config.model_copy(update={"model": name})
    with exit_on_interrupt():
        checking = _check(config, saved, weights, cache_dtype, defaults)
        report, allowed, kind = asyncio.run(checking)
    if as_json:
        json.dump(_to_json(report, allowed, kind), sys.stdout, indent=2)
        print()
    else:
        _print_report(report, allowed, f"{name} in {kind}")
    return 0 if report.is_consistent(allowed) else 1


async def _check(
    config: ClientConfig,
    saved: SavedAnswer,
    weights: str,
    cache_dtype: CacheDtype,
    defaults: str,
) -> tuple[AnswerReport, AllowedErrors, str]:
    """What was found, what is allowed, and the kind of computation."""
    from transformers.utils import logging as transformers_logging

    from nesa_node.api.models.served_model import ServedModel
    from nesa_node.api.schemas.generation_request import read_default_sampling
    from nesa_node.api.verification.answer_check import AnswerCheck, make_jobs
    from nesa_node.api.verification.verdict import allowed_errors
    from nesa_node.client.model.auto import open_named_checkpoint
    from nesa_node.engine.weights.checkpoint import compute_model_id
    from nesa_node.engine.weights.tokenizer import load_tokenizer

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    assert config.model is not None
    checkpoint = open_named_checkpoint(config, config.model)
    dtype = str(checkpoint.resolve_dtype(config.torch_dtype)).removeprefix("torch.")
    tokenizer = load_tokenizer(checkpoint.fetch_side_files())
    with (
        track_wait("the answer to be computed again"),
        _open(config, checkpoint, weights, cache_dtype) as model,
    ):
        served = ServedModel(
            model,
            tokenizer,
            name=checkpoint.name,
            model_id=compute_model_id(checkpoint),
            defaults=read_default_sampling(model.generation_config)
            if defaults == "model"
            else None,
        )
        jobs = await make_jobs(served, saved)
        report = await asyncio.to_thread(AnswerCheck(served, model).check, saved, jobs)
    held = [] if weights == "none" else [f"{weights} weights"]
    held += [] if cache_dtype == "auto" else [f"KV caches in {cache_dtype}"]
    kind = f"{dtype} with {' and '.join(held)}" if held else dtype
    return report, allowed_errors(dtype), kind


async def _audit_session(config: ClientConfig, path: Path, *, as_json: bool) -> int:
    """Audit a kept session's nodes again; 1 where one of them gave something else."""
    import random

    from nesa_node.cli.views.decisions import print_decision
    from nesa_node.client.model.auto import open_named_checkpoint
    from nesa_node.client.verification.audit_history import AuditHistory
    from nesa_node.client.verification.auditor import Auditor
    from nesa_node.client.verification.kept_session import read_session
    from nesa_node.client.verification.session_audit import find_mismatch
    from nesa_node.core.decision_log import LoggedDecision
    from nesa_node.core.errors import ModelMismatchError, ProtocolError
    from nesa_node.engine.weights.checkpoint import compute_model_id

    kept = read_session(path)
    checkpoint = open_named_checkpoint(config, config.model or kept.model)
    kept.check_fits(int(checkpoint.config.hidden_size), checkpoint.num_blocks)
    if (found := compute_model_id(checkpoint)) != kept.model_id:
        raise ModelMismatchError(f"{path} is of {kept.model_id}, {checkpoint.name} is {found}")
    auditor = Auditor(
        checkpoint, 0.0, AuditHistory(None), rng=random.Random(0), scheme=config.audit_scheme
    )
    records = []
    for work, drawn_with in kept.hops:
        try:
            mismatch = find_mismatch(work)
        except ProtocolError as error:
            mismatch = str(error)
        if mismatch is None:
            with track_wait(f"blocks {work.span} to be computed again"):
                record = await auditor.judge(work)
        else:
            reason = f"the file is edited: {mismatch}"
            record = auditor.describe_outcome(work, "not audited", reason)
        records.append(replace(record, drawn_with=drawn_with))
    if as_json:
        json.dump([asdict(record) for record in records], sys.stdout, indent=2)
        print()
    else:
        for record in records:
            name = kept.session.hex()
            print_decision(LoggedDecision("audit", name, kept.kept_at, asdict(record)))
    return 0 if all(record.outcome in ("passed", "uncalibrated") for record in records) else 1


@contextmanager
def _open(
    config: ClientConfig, checkpoint: Checkpoint, weights: str, cache_dtype: CacheDtype
) -> Iterator[DistributedModelForCausalLM]:
    """The model, with its blocks here or in the swarm of --initial-peers."""
    from nesa_node.cli.client_model import open_client_model
    from nesa_node.engine.kernels.threads import fix_threads
    from nesa_node.engine.model.devices import choose_device
    from nesa_node.evaluation.results import Cell, LocalModels

    if config.initial_peers:
        model, _ = open_client_model(config)
        with model:
            yield model
        return
    if config.threads is not None:
        fix_threads(config.threads)
    local = LocalModels(
        checkpoint,
        nodes=1,
        dtype=checkpoint.resolve_dtype(config.torch_dtype),
        device=choose_device(config.device),
        client_quant_type=config.client_quant_type,
        cache_dtype=cache_dtype,
    )
    with local.open(Cell(weights, "none")) as model:
        yield model


def _print_report(report: AnswerReport, allowed: AllowedErrors, kind: str) -> None:
    for choice in report.choices:
        shown = choice.differences[:MAX_SHOWN_DIFFERENCES]
        for one in shown:
            print(
                escape_lines(
                    f"choice {choice.index}, token {one.position}: {one.text!r} where the model "
                    f"gives {one.expected_text!r}, {one.gap:.3g} logits away "
                    f"({one.relative_gap:.2g} of the largest logit)"
                )
            )
        if len(choice.differences) > len(shown):
            print(f"choice {choice.index}: {len(choice.differences) - len(shown)} more")
        for problem in choice.problems:
            print(escape_lines(f"choice {choice.index}: {problem}"))
    for note in report.notes:
        print(escape_lines(f"note: {note}"))
    print(f"{report.describe(allowed)}")
    print(escape_lines(report.verdict(allowed, kind)))


def _to_json(report: AnswerReport, allowed: AllowedErrors, kind: str) -> dict[str, object]:
    return {
        "consistent": report.is_consistent(allowed),
        "computation": kind,
        "tokens": report.tokens,
        "differing": report.differing,
        "worst_gap": _finite(report.worst_gap),
        "worst_logprob_error": report.worst_logprob_error,
        "allowed": asdict(allowed),
        "notes": list(report.notes),
        "choices": [
            {
                **asdict(choice),
                "differences": [
                    {
                        **asdict(one),
                        "gap": _finite(one.gap),
                        "relative_gap": _finite(one.relative_gap),
                    }
                    for one in choice.differences
                ],
            }
            for choice in report.choices
        ],
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity: a token that can never be drawn has none."""
    return None if value == float("inf") else value
