"""`nesa-node leakage`: what nodes recover of a text, mode by mode."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from nesa_node.cli.flags import OUTPUT, Flags, load_command_config
from nesa_node.cli.process_setup import exit_on_interrupt
from nesa_node.core.errors import ConfigError
from nesa_node.core.wait_tracking import track_wait

if TYPE_CHECKING:
    from nesa_node.core.settings.models import ClientConfig

TEXT_GROUP = Group("Texts", sort_key=6)


def leakage(
    model: Annotated[
        str | None,
        Parameter(help="A local folder. [default: SmolLM2-135M-Instruct]"),
    ] = None,
    /,
    *,
    text: Annotated[
        str | None,
        Parameter(
            metavar="FILE|NAME",
            group=TEXT_GROUP,
            help="A file, debian-handbook or bible-kjv: its first tokens are the attacker's, its "
            "last ones are attacked. [default: the installed one of these two]",
        ),
    ] = None,
    training_tokens: Annotated[
        int, Parameter(group=TEXT_GROUP, help="Tokens of the attacker's text.")
    ] = 40960,
    secret_tokens: Annotated[
        int, Parameter(group=TEXT_GROUP, help="Tokens that are attacked.")
    ] = 2048,
    window: Annotated[int, Parameter(group=TEXT_GROUP, help="Tokens of a prompt.")] = 128,
    json: Annotated[
        Path | None, Parameter(group=OUTPUT, help="Write all results to this file.")
    ] = None,
    page: Annotated[
        Path | None,
        Parameter(
            group=OUTPUT,
            help="Measure nothing; print docs/privacy.md as it follows from this file of --json.",
        ),
    ] = None,
    flags: Flags["ClientConfig"] | None = None,
) -> int:
    """Attack what nodes receive: start a swarm on this machine for each mode, and send a text.

    Nodes run in this process, and keep what they receive. Takes minutes for a small model.
    """
    from nesa_node.core.settings.declaration import user_path
    from nesa_node.core.settings.models import ClientConfig

    config = load_command_config(ClientConfig, flags, model=model)
    if page is not None:
        from nesa_node.evaluation.leakage_page import make_page, read_leakage

        rows, options = read_leakage(user_path(page))
        print(make_page(rows, options, source=str(page)), end="")
        return 0
    if min(training_tokens, secret_tokens) < window or window < 32:
        raise ConfigError("--window: at least 32 tokens, and no more than either text has")
    json = None if json is None else user_path(json)
    if json is not None and not json.parent.is_dir():
        raise ConfigError(f"--json {json}: there is no folder {json.parent}")
    with exit_on_interrupt():
        from nesa_node.engine.kernels.threads import fix_threads
        from nesa_node.engine.weights.demo_model import demo_model_path
        from nesa_node.engine.weights.hub import open_checkpoint
        from nesa_node.engine.weights.tokenizer import load_tokenizer
        from nesa_node.evaluation.leakage import (
            DEPTHS,
            MIN_BLOCKS,
            NOISE_BLOCK,
            LeakageMeasurement,
            LeakageSetup,
            cut_windows,
        )
        from nesa_node.evaluation.leakage_page import print_leakage, write_leakage
        from nesa_node.evaluation.scoring import encode_text
        from nesa_node.evaluation.tasks import default_text, read_text

    if config.threads is not None:
        fix_threads(config.threads)
    folder = demo_model_path(config.cache_dir) if config.model is None else user_path(config.model)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: give the folder of a model")
    checkpoint = open_checkpoint(str(folder), cache_dir=config.cache_dir)
    name = default_text() if text is None else text
    with track_wait("the text"):
        ids = encode_text(load_tokenizer(checkpoint.fetch_side_files()), read_text(name))
    if len(ids) < training_tokens + secret_tokens:
        raise ConfigError(
            f"--text {name}: it has {len(ids)} tokens, and {training_tokens + secret_tokens} are "
            "needed: give a longer one, or smaller --training-tokens and --secret-tokens"
        )
    if (blocks := checkpoint.num_blocks) < MIN_BLOCKS:
        raise ConfigError(f"{folder} has {blocks} blocks: attacks need at least {MIN_BLOCKS}")
    setup = LeakageSetup(
        depths=tuple(depth for depth in DEPTHS if depth < blocks),
        noise_block=min(NOISE_BLOCK, blocks - 2),
        training_ids=cut_windows(ids[:training_tokens], window),
        secret_ids=cut_windows(ids[-secret_tokens:], window),
    )
    rows = []
    for row in LeakageMeasurement(folder, setup).rows():
        rows.append(row)
        told = ", ".join(f"{each.attack} {each.percent:.1f}%" for each in row.recovered)
        print(f"{row.mode}, {row.setting}: {told}", file=sys.stderr)
    options = {
        "model": checkpoint.name,
        "text": name,
        "training": setup.training_ids.numel(),
        "secret": setup.secret_ids.numel(),
        "window": window,
    }
    print_leakage(rows, title=f"{checkpoint.name} on {name}", out=sys.stdout)
    if json is not None:
        try:
            write_leakage(rows, json, options=options)
        except OSError as error:
            raise ConfigError(f"--json {json}: cannot be written ({error.strerror})") from error
    return 0
