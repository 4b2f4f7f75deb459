"""`nesa-node plan` and `task`: networks of any kind, divided among machines and used."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from nesa_node.cli.flags import OUTPUT, Flags, JsonFlag, load_command_config
from nesa_node.cli.process_setup import exit_on_interrupt
from nesa_node.core.errors import ConfigError
from nesa_node.core.wait_tracking import track_wait

if TYPE_CHECKING:
    from nesa_node.core.settings.models import TaskConfig

REQUEST_GROUP = Group("A request", sort_key=5)
MACHINES_GROUP = Group("Machines", sort_key=6)
SEARCH_GROUP = Group("Search", sort_key=7)


def plan(
    model: Annotated[
        str,
        Parameter(
            help="A folder with a config.json of transformers or diffusers, or with several "
            "networks of diffusers, or a model's name on the hub."
        ),
    ],
    /,
    *,
    nodes: Annotated[
        int, Parameter(group=MACHINES_GROUP, help="So many equal machines, of the rates below.")
    ] = 3,
    tflops: Annotated[
        float, Parameter(group=MACHINES_GROUP, help="Arithmetic of each, in 10^12 FLOP/s.")
    ] = 10.0,
    memory_gb_per_s: Annotated[
        float, Parameter(group=MACHINES_GROUP, help="Rate of its fast memory.")
    ] = 300.0,
    link_mbit_per_s: Annotated[
        float, Parameter(group=MACHINES_GROUP, help="Rate of its link, in each direction.")
    ] = 1000.0,
    fast_memory_gb: Annotated[
        float, Parameter(group=MACHINES_GROUP, help="Size of its fast memory; inf: enough.")
    ] = float("inf"),
    stream_gb_per_s: Annotated[
        float,
        Parameter(
            group=MACHINES_GROUP,
            help="Rate at which weights that do not fit are read again in each run.",
        ),
    ] = 2.0,
    machines: Annotated[
        Path | None,
        Parameter(
            group=MACHINES_GROUP,
            help="Unequal ones instead: a TOML file with tables [[machine]] of these keys (with _ "
            "for -), count and name; and tables [[link]] with between (two names) and mbit_per_s "
            "where two are slower than their links.",
        ),
    ] = None,
    batch: Annotated[int, Parameter(group=REQUEST_GROUP, help="Items of a request.")] = 1,
    tokens: Annotated[int, Parameter(group=REQUEST_GROUP, help="Tokens of each text.")] = 128,
    image_size: Annotated[
        int | None,
        Parameter(
            group=REQUEST_GROUP,
            help="Pixels of an image's sides. Without: what the config says, or 224.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Parameter(group=REQUEST_GROUP, help="Of weights and activations."),
    ] = "float32",
    seed: Annotated[int, Parameter(group=SEARCH_GROUP, help="Seed of the search.")] = 0,
    search_s: Annotated[
        float, Parameter(group=SEARCH_GROUP, help="Longest search for a better order, in seconds.")
    ] = 10.0,
    out: Annotated[
        Path | None,
        Parameter(group=OUTPUT, help="Write the plan for `nesa-node run --plan`, too: a new file."),
    ] = None,
    svg: Annotated[
        Path | None, Parameter(group=OUTPUT, help="Draw the pieces, too: a file that ends in .svg.")
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Show how MODEL would be cut into pieces, one for each of several machines.

    Any network that `torch.export` can trace: no weights are read, and no node is started or
    contacted. A piece is for a node of its own: begin them with `nesa-node run MODEL --plan FILE`.
    """
    for flag, value in (("--batch", batch), ("--tokens", tokens), ("--image-size", image_size)):
        if value is not None and not 1 <= value <= 1_000_000:
            raise ConfigError(f"{flag} {value}: a number from 1 to 1,000,000")
    if not 0 < search_s <= 3600:
        raise ConfigError(f"--search-s {search_s:g}: more than 0, at most 3600")
    if seed < 0:
        raise ConfigError(f"--seed {seed}: a whole number from 0")
    if svg is not None and svg.suffix.lower() != ".svg":
        raise ConfigError(f"--svg {svg}: the name must end in .svg")
    from nesa_node.cli.partition_input import parse_machines, read_machines
    from nesa_node.core.settings.declaration import default_cache_dir, user_path

    if machines is None:
        rates = {
            "tflops": tflops,
            "memory_gb_per_s": memory_gb_per_s,
            "link_mbit_per_s": link_mbit_per_s,
            "fast_memory_gb": fast_memory_gb,
            "stream_gb_per_s": stream_gb_per_s,
        }
        every = parse_machines([{"count": nodes, **rates}], "--nodes and the flags of machines")
    else:
        every = read_machines(user_path(machines))
    import torch

    from nesa_node.cli.views import partition as views
    from nesa_node.engine.graphs.model_graph import RequestSizes, capture_model
    from nesa_node.engine.graphs.network import make_plan
    from nesa_node.engine.weights.hub import fetch_config
    from nesa_node.sharding.partition import find_partition

    if svg is not None:
        views.check_svg(svg)
    if out is not None and out.exists():
        raise ConfigError(f"--out {out} exists")
    folder = fetch_config(model, cache_dir=default_cache_dir())
    sizes = RequestSizes(batch, tokens, image_size)
    with track_wait("the model's graph to be captured"):
        captured = capture_model(
            folder, name=model, dtype=getattr(torch, dtype), sizes=sizes, without_memory=out is None
        )
    with track_wait(f"a search of {search_s:g} s"):
        found = find_partition(
            captured.graph,
            every.machines,
            pair_rates_KK=every.pair_rates_KK,
            seed=seed,
            budget_s=search_s,
            on_progress=views.show_progress,
        )
    if out is not None:
        pieces = [piece.operations for piece in found.pieces if piece.operations]
        views.write_plan(make_plan(captured, pieces, getattr(torch, dtype), sizes), out)
    if as_json:
        views.print_json(captured.graph, found, every.names)
    else:
        views.print_partition(captured.graph, found, every.names, sys.stdout)
    if svg is not None:
        views.draw(found, every.names, svg)
    return 0


def task(
    name: Annotated[
        str, Parameter(help="As transformers calls it: image-classification, fill-mask, ...")
    ],
    inputs: Annotated[
        tuple[str, ...], Parameter(help="Texts, or files of pictures or speech.", negative=())
    ] = (),
    /,
    *,
    model: Annotated[
        str,
        Parameter(
            metavar="MODEL", help="A folder, or a model's name on the hub, as the nodes have it."
        ),
    ],
    label: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="LABEL",
            negative=(),
            show_default=False,
            help="A possible answer of the zero-shot tasks; may be repeated.",
        ),
    ] = (),
    question: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="QUESTION",
            negative=(),
            show_default=False,
            help="For question-answering, about each of INPUTS; may be repeated.",
        ),
    ] = (),
    steps: Annotated[
        int | None, Parameter(help="Of text-to-image. Without: what the pipeline takes.")
    ] = None,
    seed: Annotated[
        int | None, Parameter(help="Of text-to-image: the same one gives the same picture.")
    ] = None,
    as_json: JsonFlag = False,
    flags: Flags["TaskConfig"] | None = None,
) -> int:
    """Have a network in the swarm work on INPUTS, one after another.

    It classifies, detects, segments, embeds, translates, summarizes, captions, transcribes,
    answers or paints; pictures are written as PNG files.

    The network is one that nodes serve in pieces (`nesa-node run MODEL`).
    """
    from nesa_node.core.settings.models import TaskConfig

    config: TaskConfig = load_command_config(TaskConfig, flags)
    if not inputs:
        raise ConfigError("INPUTS are missing: a text, or the file of a picture or of speech")
    if name.startswith("zero-shot") != bool(label):
        raise ConfigError("--label is for the zero-shot tasks, which need it")
    if (name == "question-answering") != bool(question):
        raise ConfigError("--question is for question-answering, which needs it")
    if name != "text-to-image" and (steps is not None or seed is not None):
        raise ConfigError("--steps and --seed are for text-to-image")
    if seed is not None and not 0 <= seed < 1 << 63:
        raise ConfigError(f"--seed {seed}: a whole number from 0 to 2^63 - 1")
    from nesa_node.cli.client_model import open_pipeline, resolve_initial_peers, save_last_swarm

    config = resolve_initial_peers(config, model)
    with exit_on_interrupt():
        from nesa_node.cli.views.task_answers import (
            plain,
            print_answer,
            save_painted,
            save_pictures,
        )

    more = {"candidate_labels": list(label)} if label else {}
    with open_pipeline(config, name, model) as answering:
        save_last_swarm(config, model)
        answers: list[Any] = []
        for each in inputs:
            try:
                if question:
                    answer: Any = [answering(question=one, context=each) for one in question]
                elif name == "text-to-image":
                    answer = save_painted(answering(each, **_painting_options(steps, seed)), each)
                else:
                    answer = save_pictures(answering(each, **more), each)
            except (ValueError, TypeError, OSError) as error:  # transformers' own
                reason = str(error).strip().partition("\n")[0]
                raise ConfigError(f"{each}: {reason}") from error
            if not as_json:
                print_answer(each, answer, sys.stdout)
            answers.append({"input": each, "answer": plain(answer)})
    if as_json:
        json.dump(answers, sys.stdout, indent=2)
        print()
    return 0


def _painting_options(steps: int | None, seed: int | None) -> dict[str, Any]:
    import torch

    options: dict[str, Any] = {} if steps is None else {"num_inference_steps": steps}
    if seed is not None:
        options["generator"] = torch.Generator().manual_seed(seed)
    return options
