"""`nesa-node eval`: perplexity and accuracy for quantized weights and compressed hidden states."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from nesa_node.cli.flags import COMPUTE, OUTPUT, SWARM, Flags, load_command_config
from nesa_node.cli.process_setup import exit_on_interrupt
from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.choices import GENERATED_ITEMS
from nesa_node.core.wait_tracking import track_wait

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
    from nesa_node.core.settings.models import ClientConfig
    from nesa_node.engine.weights.checkpoint import Checkpoint
    from nesa_node.evaluation.results import Cell, CellResult, EvaluationSample, OpenModel
    from nesa_node.evaluation.tasks import HarnessTasks, MultipleChoiceItem

PRECISIONS_GROUP = Group("Precisions", sort_key=5)
SAMPLE_GROUP = Group("Texts and items", sort_key=6)


def evaluate(
    model: Annotated[
        str | None,
        Parameter(
            help="A local folder, or the name of a model on the hub. "
            "[default: SmolLM2-135M-Instruct]"
        ),
    ] = None,
    /,
    *,
    weights: Annotated[
        str | None,
        Parameter(
            metavar="NAMES",
            group=PRECISIONS_GROUP,
            help="Quantizations: none, int8, nf4, llm_int8. [default: none,int8,nf4]",
        ),
    ] = None,
    wire: Annotated[
        str | None,
        Parameter(
            metavar="NAMES",
            group=PRECISIONS_GROUP,
            help="Codecs of the hidden states. [default: none,blockwise8@2:64:8,int4@2:32:48]",
        ),
    ] = None,
    text: Annotated[
        str | None,
        Parameter(
            metavar="FILE|NAME",
            group=SAMPLE_GROUP,
            help="A file, debian-handbook or bible-kjv. [default: the installed one of these two]",
        ),
    ] = None,
    tokens: Annotated[
        int,
        Parameter(group=SAMPLE_GROUP, help="Tokens of the text, for the perplexity; 0 skips it."),
    ] = 4096,
    context: Annotated[int, Parameter(group=SAMPLE_GROUP, help="Tokens of a window.")] = 512,
    stride: Annotated[
        int | None,
        Parameter(
            group=SAMPLE_GROUP, help="Tokens that each window scores. [default: half a window]"
        ),
    ] = None,
    choices: Annotated[
        str,
        Parameter(
            metavar="FILE|NAME",
            group=SAMPLE_GROUP,
            help='A file of lines {"context": "...", "endings": ["...", "..."], "label": 0}, '
            "or generated: from the text.",
        ),
    ] = GENERATED_ITEMS,
    items: Annotated[
        int, Parameter(group=SAMPLE_GROUP, help="Multiple-choice items; 0 skips them.")
    ] = 100,
    seed: Annotated[int, Parameter(group=SAMPLE_GROUP, help="Seed of the generated items.")] = 0,
    tasks: Annotated[
        str | None,
        Parameter(
            metavar="NAMES",
            group=SAMPLE_GROUP,
            help="Tasks of lm-evaluation-harness, or table-1: the five of the Nesa paper's table.",
        ),
    ] = None,
    task_folder: Annotated[
        Path | None, Parameter(group=SAMPLE_GROUP, help="Folder of YAML files with your own tasks.")
    ] = None,
    task_limit: Annotated[
        int | None, Parameter(group=SAMPLE_GROUP, help="Items of each task. [default: all]")
    ] = None,
    live: Annotated[
        bool,
        Parameter(
            group=SWARM,
            negative=(),
            help="Measure a live swarm: that of --initial-peers, else the last used one.",
        ),
    ] = False,
    nodes: Annotated[
        int, Parameter(group=COMPUTE, help="Number of spans in which this process runs the blocks.")
    ] = 3,
    json: Annotated[
        Path | None, Parameter(group=OUTPUT, help="Write the table to this file, with all results.")
    ] = None,
    flags: Flags["ClientConfig"] | None = None,
) -> int:
    """Measure perplexity and multiple-choice accuracy, for each combination of precisions.

    This process runs the model in spans as a swarm would, in bfloat16 unless --torch-dtype says
    otherwise. With --live or --initial-peers a live swarm runs it, with the weights that its nodes
    hold. Each combination is compared with the one without quantization.
    """
    from nesa_node.cli.client_model import resolve_initial_peers, save_last_swarm
    from nesa_node.core.settings.declaration import user_path
    from nesa_node.core.settings.models import ClientConfig

    config = load_command_config(ClientConfig, flags, model=model)
    live = live or bool(config.initial_peers)
    if live and weights is not None:
        raise ConfigError("--weights: the nodes of a live swarm choose their weights; leave it out")
    if live:
        config = resolve_initial_peers(config, config.model)
    if config.quality != "exact":
        raise ConfigError("--quality: use --wire instead, which may name several codecs")
    _check_numbers(tokens=tokens, items=items, nodes=nodes, task_limit=task_limit, tasks=tasks)
    if context < 2:
        raise ConfigError(f"--context {context}: at least 2 tokens, as one predicts the other")
    json = None if json is None else user_path(json)
    if json is not None and not json.parent.is_dir():
        raise ConfigError(f"--json {json}: there is no folder {json.parent}")

    with exit_on_interrupt():
        from nesa_node.engine.model.devices import choose_device
        from nesa_node.evaluation.results import (
            WEIGHTS,
            WEIGHTS_AS_SERVED,
            WIRE_CODECS,
            LocalModels,
            check_weights,
            check_wire,
            make_cells,
        )
        from nesa_node.evaluation.tasks import default_text, read_text

    chosen = parse_names("--weights", weights, (WEIGHTS_AS_SERVED,) if live else WEIGHTS)
    codecs = parse_names("--wire", wire, ("none",) if live else WIRE_CODECS)
    if not live:
        check_weights(chosen)

    from nesa_node.evaluation.results import print_rows, write_rows

    checkpoint, tokenizer, config = _open_checkpoint(config)
    check_wire(codecs, hidden_size=int(checkpoint.config.hidden_size))
    if not live:
        nodes = limit_parts(nodes, checkpoint.num_blocks)
    with track_wait("the text and the items"):
        name, passage = None, ""
        if tokens or (items and choices == GENERATED_ITEMS):
            name = default_text() if text is None else text
            passage = read_text(name)
        sample = make_sample(
            tokenizer,
            passage,
            tokens=tokens,
            context=min(context, checkpoint.context_length),
            stride=stride,
            items=choose_items(choices, passage, items, seed),
            tasks=choose_tasks(tasks, task_folder, task_limit),
        )
    # Dtype of hidden states on the wire; nodes of a live swarm choose their own compute dtype.
    dtype = "bfloat16" if config.torch_dtype == "auto" and not live else config.torch_dtype
    if live:
        open_model = _make_live_opener(config)
    else:
        open_model = LocalModels(
            checkpoint,
            nodes=nodes,
            dtype=checkpoint.resolve_dtype(dtype),
            device=choose_device(config.device),
            client_quant_type=config.client_quant_type,
        ).open
    rows = _measure_cells(open_model, tokenizer, make_cells(chosen, codecs), sample)
    if live:
        save_last_swarm(config, config.model)
    ends = config.client_quant_type
    held = "" if ends == "none" else f", embedding and head in {ends}"
    asked = name or (choices if items else tasks)
    title = f"{checkpoint.name}{held} on {asked}{describe_sample(sample)}"
    print_rows(rows, title=title, unquantized=dtype, out=sys.stdout)
    if json is not None:
        options: dict[str, object] = {
            "model": checkpoint.name,
            "dtype": dtype,
            "client_quant_type": ends,
            "nodes": "live" if live else nodes,
            "text": name,
            "choices": choices,
            "tasks": tasks,
            "task_limit": task_limit,
            "seed": seed,
            "tokens": len(sample.ids),
            "context": sample.context,
            "stride": sample.stride,
            "items": len(sample.items),
        }
        try:
            write_rows(rows, json, options=options)
        except OSError as error:
            raise ConfigError(f"--json {json}: cannot be written ({error.strerror})") from error
    return 0


def _check_numbers(
    *, tokens: int, items: int, nodes: int, tasks: str | None, task_limit: int | None
) -> None:
    if task_limit is not None and task_limit < 2:
        raise ConfigError(
            f"--task-limit {task_limit}: at least 2, since a mean of one has no standard error"
        )
    if tokens < 0 or items < 0 or nodes < 1:
        raise ConfigError("--tokens and --items must not be negative, --nodes must be positive")
    if not tokens and not items and not tasks:
        raise ConfigError("--tokens 0 and --items 0 leave nothing to measure")


def parse_names(flag: str, given: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """Parse a flag's comma-separated names. Raises `ConfigError` for empty names."""
    if given is None:
        return tuple(default)
    listed = tuple(name.strip() for name in given.split(","))
    if not all(listed):
        raise ConfigError(f"{flag} takes names separated by commas, got {given!r}")
    return listed


def limit_parts(nodes: int, num_blocks: int) -> int:
    """Number of spans, at most one per block. Warns if `nodes` is reduced."""
    if nodes > num_blocks:
        _warn(f"--nodes {nodes}: the model has {num_blocks} blocks, so they run in {num_blocks}")
    return min(nodes, num_blocks)


def choose_items(choices: str, passage: str, count: int, seed: int) -> Sequence[MultipleChoiceItem]:
    from nesa_node.core.settings.declaration import user_path
    from nesa_node.evaluation.tasks import (
        MIN_ITEMS,
        count_possible_items,
        generate_items,
        read_items,
    )

    if not count:
        return ()
    if count < MIN_ITEMS:
        raise ConfigError(f"--items {count}: at least {MIN_ITEMS}, or 0 for none")
    if choices == GENERATED_ITEMS:
        room = count_possible_items(passage)
        if room < MIN_ITEMS:
            _warn("the text has too few passages for multiple-choice items: none are measured")
            return ()
        if room < count:
            _warn(f"the text has room for {room} items, {count} are asked for: {room} are taken")
        return generate_items(passage, count=min(count, room), seed=seed)
    return read_items(user_path(choices))[:count]


def choose_tasks(given: str | None, folder: Path | None, limit: int | None) -> HarnessTasks | None:
    from nesa_node.core.settings.declaration import user_path
    from nesa_node.evaluation.tasks import PAPER_TABLE_1_TASKS, HarnessTasks

    if given is None:
        return None
    folder = None if folder is None else user_path(folder)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--task-folder {folder}: no such folder")
    chosen = PAPER_TABLE_1_TASKS if given == "table-1" else parse_names("--tasks", given, ())
    return HarnessTasks(chosen, folder=folder, limit=limit)


def make_sample(
    tokenizer: PreTrainedTokenizerBase,
    passage: str,
    *,
    tokens: int,
    context: int,
    stride: int | None,
    items: Sequence[MultipleChoiceItem],
    tasks: HarnessTasks | None,
) -> EvaluationSample:
    from nesa_node.evaluation.results import EvaluationSample
    from nesa_node.evaluation.scoring import MIN_TOKENS, first_tokens, window_queries

    stride = context // 2 if stride is None else stride
    ids: Sequence[int] = ()
    if tokens:
        if tokens < MIN_TOKENS:
            raise ConfigError(f"--tokens {tokens}: at least {MIN_TOKENS}, or 0 for none")
        window_queries((), context=context, stride=stride)
        ids = first_tokens(tokenizer, passage, tokens)
        if len(ids) < MIN_TOKENS:
            _warn(f"the text has {len(ids)} tokens, too few for a perplexity ({MIN_TOKENS})")
            ids = ()
        elif len(ids) < tokens:
            _warn(f"the text has {len(ids)} tokens, {tokens} are asked for: all are taken")
        if not ids and not items and tasks is None:
            raise ConfigError("the text is too short to measure anything: give a longer --text")
    return EvaluationSample(ids, context, stride, items, tasks)


def describe_sample(sample: EvaluationSample) -> str:
    """Sizes of the sample, for the table's title."""
    parts = []
    if sample.ids:
        parts.append(f"{len(sample.ids)} tokens in windows of {sample.context}")
    if sample.items:
        parts.append(f"{len(sample.items)} items of multiple choice")
    return f": {', '.join(parts)}" if parts else ""


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _open_checkpoint(
    config: ClientConfig,
) -> tuple[Checkpoint, PreTrainedTokenizerBase, ClientConfig]:
    """Open checkpoint and tokenizer, and return a config that names the model."""
    from transformers.utils import logging as transformers_logging

    from nesa_node.core.settings.declaration import secret_text
    from nesa_node.engine.kernels.threads import fix_threads
    from nesa_node.engine.weights.demo_model import demo_model_path
    from nesa_node.engine.weights.hub import open_checkpoint
    from nesa_node.engine.weights.tokenizer import load_tokenizer

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if config.threads is not None:
        fix_threads(config.threads)
    if config.model is None:
        config = config.model_copy(update={"model": str(demo_model_path(config.cache_dir))})
    assert config.model is not None
    checkpoint = open_checkpoint(
        config.model,
        revision=config.revision,
        token=secret_text(config.token),
        cache_dir=config.cache_dir,
    )
    return checkpoint, load_tokenizer(checkpoint.fetch_side_files()), config


def _make_live_opener(config: ClientConfig) -> OpenModel:
    from nesa_node.cli.client_model import open_client_model
    from nesa_node.compression.codecs import EXACT

    @contextmanager
    def open_model(cell: Cell) -> Iterator[DistributedModelForCausalLM]:
        quality = EXACT if cell.wire == "none" else cell.wire
        model, _ = open_client_model(config.model_copy(update={"quality": quality}))
        with model:
            yield model

    return open_model


def _measure_cells(
    open_model: OpenModel,
    tokenizer: PreTrainedTokenizerBase,
    cells: Sequence[Cell],
    sample: EvaluationSample,
) -> list[CellResult]:
    from nesa_node.evaluation.results import measure_cells

    print(f"{len(cells)} combinations are measured, one after another", file=sys.stderr)
    rows: list[CellResult] = []
    measured = measure_cells(open_model, tokenizer, cells, sample)
    for number, cell in enumerate(cells, 1):
        with track_wait(f"combination {number} of {len(cells)} ({cell})"):
            row = next(measured)
        rows.append(row)
        print(f"{number}/{len(cells)} {row.cell}: {row.seconds:.0f} s", file=sys.stderr)
    return rows
