"""`python -m benchmarks NAME`: run one benchmark, print its table, write its JSON."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import get_args
from zipfile import BadZipFile

import numpy as np

from benchmarks import (
    adapters,
    answer_checks,
    audit_attacks,
    audit_cost,
    audit_evasion,
    audit_framing,
    audit_thresholds,
    cache_dtype,
    changes,
    churn,
    codecs,
    concurrency,
    decode,
    directory_scale,
    distribution_votes,
    estimate,
    experts,
    finetuning,
    forecast,
    frozen,
    gating,
    hedging,
    honest_audits,
    honest_sessions,
    hop,
    large,
    masks,
    networks,
    partitions,
    pictures,
    pool,
    prefill,
    private,
    private_sessions,
    routing,
    scale,
    schemas,
    smpc,
    stability,
    swarm,
    thread_settings,
    training,
    training_load,
    training_swarm,
    tuning,
)
from benchmarks.gateway import bench as gateway
from benchmarks.models import SHAPES
from benchmarks.options import Options, Quant
from benchmarks.picture_scores import check_scorer
from benchmarks.regions import bench as regions
from benchmarks.results import FOLDER, load_average, write_result
from benchmarks.wan import auto, drafts
from benchmarks.wan import bench as wan
from benchmarks.wan.cells import CODECS
from nesa_node.core.errors import ConfigError
from nesa_node.core.logging import setup_logging

BENCHMARKS: dict[str, ModuleType] = {
    "adapters": adapters,
    "answer-checks": answer_checks,
    "audit-attacks": audit_attacks,
    "audit-cost": audit_cost,
    "audit-evasion": audit_evasion,
    "audit-framing": audit_framing,
    "audit-thresholds": audit_thresholds,
    "auto": auto,
    "cache-dtype": cache_dtype,
    "changes": changes,
    "churn": churn,
    "codecs": codecs,
    "concurrency": concurrency,
    "decode": decode,
    "defaults": thread_settings,
    "directory-scale": directory_scale,
    "drafts": drafts,
    "distribution-votes": distribution_votes,
    "estimate": estimate,
    "experts": experts,
    "forecast": forecast,
    "finetuning": finetuning,
    "frozen": frozen,
    "gateway": gateway,
    "gating": gating,
    "hedging": hedging,
    "honest-audits": honest_audits,
    "honest-sessions": honest_sessions,
    "hop": hop,
    "large": large,
    "networks": networks,
    "partitions": partitions,
    "pictures": pictures,
    "pool": pool,
    "prefill": prefill,
    "masks": masks,
    "private": private,
    "private-sessions": private_sessions,
    "regions": regions,
    "routing": routing,
    "scale": scale,
    "schemas": schemas,
    "smpc": smpc,
    "stability": stability,
    "swarm": swarm,
    "training": training,
    "training-load": training_load,
    "training-swarm": training_swarm,
    "tuning": tuning,
    "wan": wan,
}
SIZES_OF_PLANS = ("70b",)
"""What the planners' benchmarks name as their model: they run none."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    setup_logging("warning")
    module = BENCHMARKS[arguments.name]
    defaults: Options = module.QUICK if arguments.quick else module.DEFAULTS
    names = {field.name for field in fields(Options)}
    options = defaults.updated({k: v for k, v in vars(arguments).items() if k in names})
    try:
        check_arguments(options, arguments.json)
    except ConfigError as error:
        parser.error(str(error))
    load_before = load_average()
    rows = module.run(options)
    path = write_result(
        arguments.name,
        rows,
        arguments.json,
        options=options.as_json(),
        load_before=load_before,
    )
    print(f"\nwritten to {path}")


def check_arguments(options: Options, json_path: Path | None) -> None:
    """Find what would fail after minutes of measuring. Raises `ConfigError`."""
    if options.matrix is not None:
        check_matrix(Path(options.matrix))
    if options.scorer is not None:
        check_scorer(Path(options.scorer))
    known = {*SHAPES, "demo", *SIZES_OF_PLANS, *experts.SHAPES}
    folder = Path(options.model).expanduser()
    if options.model not in known and not (folder / "config.json").is_file():
        raise ConfigError(
            f"--model: {folder} has no config.json; give the folder of a model, or one of: "
            + ", ".join((*SHAPES, "demo"))
        )
    if options.runs < 1:
        raise ConfigError(f"--runs: {options.runs} is no number of runs; give 1 or more")
    if json_path is not None and json_path.is_dir():
        raise ConfigError(f"--json: {json_path} is a folder; give the name of a file in it")
    folder = FOLDER if json_path is None else json_path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--json: cannot write to {folder}; give a path in another folder")


def check_matrix(path: Path) -> None:
    try:
        with np.load(path) as archive:
            shape = archive[archive.files[0]].shape
    except (OSError, ValueError, IndexError, AttributeError, TypeError, BadZipFile) as error:
        raise ConfigError(f"--matrix: {path} is no .npz with an array: {error}") from None
    if len(shape) not in (2, 3) or shape[-1] != shape[-2]:
        raise ConfigError(
            f"--matrix: the array of {path} must be [nodes, nodes] or [slices, nodes, nodes], "
            f"not {list(shape)}"
        )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("name", choices=sorted(BENCHMARKS))
    add("--json", type=Path, help="where to write [default: benchmarks/results]")
    add("--quick", action="store_true", help="a small model and few tokens: does it still run?")
    add("--model", help=f"{', '.join(SHAPES)}, demo, or a folder")
    add("--dtype", choices=("float32", "bfloat16"))
    add("--device", help="of daemons, client and local transformers [default: cpu]")
    add("--nodes", type=numbers, metavar="N,N", help="numbers of daemons to try")
    add("--sessions", type=numbers, metavar="N,N", help="numbers of sessions to try")
    add(
        "--threads",
        type=numbers_or_0,
        metavar="N,N",
        help="of each process; 0: no --threads, as users run it [default: 1,0]"
        " (decode, concurrency, prefill)",
    )
    add("--runs", type=int, help="how often each figure is measured [default: 5]")
    add("--quant-type", choices=get_args(Quant), help="of the daemons' weights [default: none]")
    add("--prompt-tokens", type=int)
    add("--new-tokens", type=int)
    add("--long-prompt", type=int, help="tokens of the prompt that disturbs; 0: none")
    add("--seconds", type=float, help="how long churn, or jitter, lasts [180; regions: 600]")
    add("--round-trips-ms", type=numbers_or_0, metavar="MS,MS", help="between any two (wan)")
    add("--bandwidths-mbit", type=numbers, metavar="M,M", help="Mbit/s between any two (wan)")
    add("--batches", type=numbers, metavar="N,N", help="rows of the session (wan)")
    add("--codecs", type=names_of_codecs, metavar="NAME,NAME", help=f"{', '.join(CODECS)} (wan)")
    add("--prompts", type=numbers, metavar="N,N", help="tokens of prompts (auto)")
    add("--congestion-control", help="of TCP between the machines [default: cubic] (wan)")
    add("--sysctls", type=sysctls, metavar="NAME=VALUE,...", help="of the machines (wan)")
    add("--ga", choices=("corrected", "printed"), help="operators of the paper, or ours (tuning)")
    add("--scorer", help="a folder with a CLIP model that scores pictures")
    add("--matrix", help="an .npz of round trips in seconds, zeros missing")
    add("--draft", help="the folder of a draft model, to be tried beside lookup (drafts)")
    add("--snapshots", type=int, help="of a trace (changes, gating, stability)")
    add("--seed", type=int, help="of weights, prompts and events [default: 0]")
    return parser


def numbers(text: str, least: int = 1) -> tuple[int, ...]:
    """Read `1,2,3`. Raises `ValueError`, which argparse turns into its own message."""
    values = tuple(int(part) for part in text.split(","))
    if min(values) < least:
        raise ValueError(f"at least {least}")
    return values


def numbers_or_0(text: str) -> tuple[int, ...]:
    return numbers(text, least=0)


def sysctls(text: str) -> tuple[str, ...]:
    settings = tuple(text.split(","))
    if not all("=" in setting for setting in settings):
        raise ValueError("each is NAME=VALUE")
    return settings


def names_of_codecs(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - CODECS.keys():
        raise ValueError(f"unknown codecs: {unknown}")
    return names


if __name__ == "__main__":
    # Through every `finally`, which stop the daemons.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
