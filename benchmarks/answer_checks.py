"""How often `nesa-node verify` notices that an answer is not what its model gives.

A model answers as a gateway has it answer, step by step, several choices at once; the check runs
once over each text. The demo model's answers go on from parts of the project's documents. Honest
answers say what machines differ by; the rest are of other weights, of another seed, or edited.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.audit_attacks import Alter, AlteredCheckpoint, other_weights
from benchmarks.audit_thresholds import choose_texts
from benchmarks.models import model_folder
from benchmarks.options import Options
from benchmarks.results import print_table
from nesa_node.api.generation.job import Delta
from nesa_node.api.models.served_model import ServedModel
from nesa_node.api.schemas.generation_request import CompletionRequest
from nesa_node.api.verification.answer_check import AnswerCheck, make_jobs
from nesa_node.api.verification.saved_answer import (
    SavedAnswer,
    SavedChoice,
    SavedToken,
    UncheckableAnswerError,
)
from nesa_node.api.verification.verdict import ChoiceReport, allowed_errors
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.ids import ModelId
from nesa_node.engine.weights.checkpoint import LocalCheckpoint, open_folder
from nesa_node.engine.weights.tokenizer import load_tokenizer
from nesa_node.evaluation.results import Cell, LocalModels

DEFAULTS = Options(model="demo", runs=6, new_tokens=64, prompt_tokens=24, batches=(3,))
QUICK = Options(model="tiny", runs=2, new_tokens=12, prompt_tokens=4, batches=(2,))
SAMPLINGS: Mapping[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
}
DTYPES = ("float32", "bfloat16")
LIES = ("other weights", "block skipped", "int8", "nf4")
"""Weights that answers are made with, beside the model's own."""


@dataclass(frozen=True, slots=True)
class Case:
    """Answers of one prompt: what was asked, and what came."""

    request: CompletionRequest
    answer: SavedAnswer


def run(options: Options) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with model_folder(options) as folder:
        if options.model != "demo":
            save_byte_tokenizer(folder)
        checkpoint = open_folder(folder)
        prompts = choose_texts(checkpoint, options.prompt_tokens, options.runs, options)
        for dtype in DTYPES if options.model == "demo" else DTYPES[:1]:
            rows += asyncio.run(measure(checkpoint, dtype, prompts, options))
    show(rows)
    return rows


def save_byte_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes beside a random model, whose answers are no texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(folder)


async def measure(
    checkpoint: LocalCheckpoint, dtype: str, prompts: Sequence[Tensor], options: Options
) -> list[dict[str, Any]]:
    cases: dict[tuple[str, str], list[Case]] = {}
    for kind in ("honest", *LIES):
        with serving(checkpoint, dtype, kind) as (served, _):
            for sampling, fields in SAMPLINGS.items():
                cases[sampling, kind] = [
                    await answer(served, make_request(prompt, fields, seed, options))
                    for seed, prompt in enumerate(prompts)
                ]
    rows = []
    with serving(checkpoint, dtype, "honest") as (served, model):
        check = AnswerCheck(served, model)
        for (sampling, kind), made in cases.items():
            variants = {kind: made}
            if kind == "honest":
                variants["one token edited"] = [edit(case) for case in made]
                if sampling != "greedy":
                    variants["other seed"] = [reseed(case) for case in made]
            for name, tried in variants.items():
                listed = [one for case in tried for one in await judge(check, served, case, True)]
                row = {"dtype": dtype, "sampling": sampling, "answers": name}
                rows.append({**row, **summarize(listed, dtype)})
            if kind == "honest" and dtype == "float32":
                texts = [one for case in made for one in await judge(check, served, case, False)]
                row = {"dtype": dtype, "sampling": sampling, "answers": "honest, text alone"}
                rows.append({**row, **summarize(texts, dtype)})
    return rows


@contextmanager
def serving(
    checkpoint: LocalCheckpoint, dtype: str, kind: str
) -> Iterator[tuple[ServedModel, DistributedModelForCausalLM]]:
    """The model in three spans, in weights of this kind."""
    alter: Alter | None = {
        "other weights": other_weights,
        "block skipped": skip_block(checkpoint.num_blocks // 2),
    }.get(kind)
    if alter is not None:
        altered = AlteredCheckpoint(
            checkpoint.name, checkpoint.folder, checkpoint.config, checkpoint.stored
        )
        altered.alter = alter
        checkpoint = altered
    local = LocalModels(
        checkpoint, nodes=3, dtype=getattr(torch, dtype), device=torch.device("cpu")
    )
    weights = kind if kind in ("int8", "nf4") else "none"
    with local.open(Cell(weights, "none")) as model:
        served = ServedModel(
            model,
            load_tokenizer(checkpoint.folder),
            name=checkpoint.name,
            model_id=ModelId(checkpoint.name),
            threads=1,
        )
        yield served, model


def skip_block(block: int) -> Alter:
    """Weights with which a block gives what it gets."""

    def alter(name: str, weight: Tensor) -> Tensor:
        ends = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
        is_last = name.endswith(ends) and f".layers.{block}." in name
        return torch.zeros_like(weight) if is_last else weight

    return alter


def make_request(
    prompt: Tensor, fields: Mapping[str, float], seed: int, options: Options
) -> CompletionRequest:
    # Greedy choices of one prompt are the same.
    n = options.batches[0] if fields["temperature"] else 1
    body = {"prompt": prompt.tolist(), "max_tokens": options.new_tokens, "n": n, "seed": seed}
    return CompletionRequest.model_validate({**body, "logprobs": 0, **fields})


async def answer(served: ServedModel, request: CompletionRequest) -> Case:
    """What a gateway answers, with each token's log probability."""
    choices = {index: SavedChoice(tokens=[]) for index in range(request.n or 1)}
    (job,) = await make_jobs(served, SavedAnswer(request, choices, None, None, None))
    async with served.generate(job) as events:
        async for event in events:
            if isinstance(event, Delta):
                choice = choices[event.index]
                choice.text += event.text
                listed = [SavedToken(token.data, token.logprob) for token in event.tokens]
                choice.tokens = [*(choice.tokens or []), *listed]
                choice.finish_reason = event.finish_reason
    return Case(request, SavedAnswer(request, choices, None, None, None))


def edit(case: Case) -> Case:
    """The middle token of each choice is " not", in the text and in the list."""
    choices = {}
    for index, choice in case.answer.choices.items():
        tokens = list(choice.tokens or ())
        at = len(tokens) // 2
        tokens[at] = SavedToken(b" not", tokens[at].logprob)
        text = b"".join(token.data for token in tokens).decode(errors="replace")
        choices[index] = SavedChoice(text, tokens, finish_reason=choice.finish_reason)
    return replace(case, answer=replace(case.answer, choices=choices))


def reseed(case: Case) -> Case:
    """The answer, as if another seed had been asked for."""
    request = case.request.model_copy(update={"seed": (case.request.seed or 0) + 1000})
    return Case(request, replace(case.answer, request=request))


async def judge(
    check: AnswerCheck, served: ServedModel, case: Case, listed: bool
) -> list[ChoiceReport | None]:
    """Reports of all choices, each checked alone; None: its text does not tell its tokens."""
    reports: list[ChoiceReport | None] = []
    jobs = await make_jobs(served, case.answer)
    for index, choice in case.answer.choices.items():
        own = choice if listed else replace(choice, tokens=None)
        alone = replace(case.answer, choices={index: replace(own)})
        try:
            reports += check.check(alone, jobs).choices
        except UncheckableAnswerError:
            reports.append(None)
    return reports


def summarize(found: Sequence[ChoiceReport | None], dtype: str) -> dict[str, Any]:
    """What was noticed, by tokens alone and with log probabilities."""
    allowed = allowed_errors(dtype)
    tokens_alone = replace(allowed, logprob=math.inf, mean_logprob=math.inf)
    reports = [report for report in found if report is not None]
    return {
        "choices": len(found),
        "uncheckable": len(found) - len(reports),
        "noticed": sum(not report.is_consistent(tokens_alone) for report in reports),
        "noticed_by_logprobs": sum(not report.is_consistent(allowed) for report in reports),
        "differing": sum(len(report.differences) for report in reports),
        "tokens": sum(report.tokens for report in reports),
        "runs": [
            {
                "gap": report.worst_gap,
                "mean_gap": report.mean_gap(allowed.gap),
                "logprob_error": report.worst_logprob_error or 0.0,
                "mean_logprob_error": report.mean_logprob_error or 0.0,
            }
            for report in reports
        ]
        or [{}],
        "problems": sorted({each for report in reports for each in report.problems}),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        "Answers that a check notices, by tokens alone and with log probabilities",
        "dtype|sampling|answers|choices|no tokens|noticed|with logprobs|tokens that differ|"
        "worst gap|worst mean|logprob error|its mean",
        [
            [
                row["dtype"],
                row["sampling"],
                row["answers"],
                str(row["choices"]),
                str(row["uncheckable"]),
                str(row["noticed"]),
                str(row["noticed_by_logprobs"]),
                f"{row['differing']} of {row['tokens']}",
                *(
                    f"{max(run.get(name, 0.0) for run in row['runs']):.2g}"
                    for name in ("gap", "mean_gap", "logprob_error", "mean_logprob_error")
                ),
            ]
            for row in rows
        ],
    )
