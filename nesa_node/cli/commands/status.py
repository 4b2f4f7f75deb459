"""`nesa-node status`, `explain` and `doctor`: a swarm's nodes, logged decisions, this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from nesa_node.cli.flags import OUTPUT, Flags, JsonFlag, ModelArgument, load_command_config
from nesa_node.cli.process_setup import exit_on_interrupt
from nesa_node.core.errors import ConfigError, is_installed

if TYPE_CHECKING:
    from nesa_node.cli.services.doctor_checks import Finding
    from nesa_node.core.settings.models import ClientConfig

REQUIRED_PACKAGES = ("torch", "transformers", "hivemind")
_LEVEL_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def status(
    model: Annotated[
        str | None, Parameter(help="Only this model: its name, folder or full id. [default: all]")
    ] = None,
    /,
    *,
    as_json: JsonFlag = False,
    watch: Annotated[
        float | None,
        Parameter(group=OUTPUT, help="Repeat every so many seconds, 2 without a number."),
    ] = None,
    flags: Flags["ClientConfig"] | None = None,
) -> int:
    """Show the nodes of a swarm, their blocks and speeds, and unserved blocks.

    With --watch until Ctrl-C, in place on a terminal; departed nodes are shown for ten minutes.
    """
    import asyncio

    from nesa_node.cli.client_model import resolve_initial_peers, save_last_swarm
    from nesa_node.core.settings.models import ClientConfig

    config = resolve_initial_peers(load_command_config(ClientConfig, flags, model=model), model)
    with exit_on_interrupt():
        from nesa_node.cli.swarm_reader import read_swarm
        from nesa_node.cli.views.swarm import (
            describe_absence,
            group_by_model,
            models_to_json,
            print_audits,
            print_dropped,
            print_models,
        )
        from nesa_node.client.verification.audit_history import AuditHistory
        from nesa_node.core.settings.declaration import default_audits_path

    if watch is not None:
        return _watch_status(config, watch, as_json=as_json)
    reading = asyncio.run(read_swarm(config))
    save_last_swarm(config, config.model)
    models = group_by_model(reading.records, config.model)
    history = AuditHistory(default_audits_path())
    missing = describe_absence(reading.records, config.model)
    if as_json:
        if not models:
            print(missing, file=sys.stderr)
        json.dump(models_to_json(models, history), sys.stdout, indent=2)
        print()
    else:
        print_models(models, missing=missing)
        print_audits(models, history)
        print_dropped(reading.dropped)
    return 0


def _watch_status(config: ClientConfig, every_s: float, *, as_json: bool) -> int:
    """Show the swarm until Ctrl-C, which is not a failure: the exit code is 0."""
    import asyncio

    from nesa_node.cli.views.swarm import (
        WatchFrame,
        check_interval,
        group_by_model,
        models_to_json,
        open_watch_table,
        watch_swarm,
    )

    def print_json(look: WatchFrame) -> None:
        """Print one line of JSON per reading."""
        print(json.dumps(models_to_json(group_by_model(look.records, config.model))), flush=True)

    check_interval(every_s)
    with suppress(KeyboardInterrupt):
        if as_json:
            asyncio.run(watch_swarm(config, every_s, print_json))
        else:
            with open_watch_table(config.model) as show:
                asyncio.run(watch_swarm(config, every_s, show))
    return 0


MAX_LISTED = 20
MAX_READ = 1000
"""Decisions read for a list; repeats are folded into one of `MAX_LISTED` rows."""


def explain(
    name: Annotated[
        str | None,
        Parameter(help="Session or placement, or a prefix of it. [default: list the last]"),
    ] = None,
    /,
    *,
    as_json: JsonFlag = False,
) -> int:
    """Show the last routing and placement decisions of this user, their costs and alternatives."""
    from nesa_node.core.decision_log import DecisionLog
    from nesa_node.core.settings.declaration import default_decisions_path

    log = DecisionLog(default_decisions_path())
    found = log.recent(MAX_LISTED if as_json else MAX_READ) if name is None else log.find(name)
    if as_json:
        shown = [
            {"kind": one.kind, "name": one.name, "made_at": one.made_at, **one.body}
            for one in found
        ]
        json.dump(shown, sys.stdout, indent=2)
        print()
        return 0
    from nesa_node.cli.views.decisions import print_decision, print_decisions

    if name is None:
        print_decisions(found[::-1], MAX_LISTED)
    else:
        for decision in found:
            print_decision(decision)
    return 0


def doctor(model: ModelArgument = None, /, *, flags: Flags["ClientConfig"] | None = None) -> int:
    """Check this machine, the connection to each of --initial-peers, and how much of MODEL fits.

    Without --initial-peers, the connection to a node that runs on this machine is checked.
    The exit code is 1 if a check failed; warnings do not count.
    """
    from nesa_node.core.settings.models import ClientConfig

    config = load_command_config(ClientConfig, flags, model=model)
    if missing := [package for package in REQUIRED_PACKAGES if not is_installed(package)]:
        # The checks themselves need them.
        raise ConfigError(f"not installed: {', '.join(missing)}; reinstall nesa-node with pip")
    from nesa_node.cli.services.doctor_checks import worst_level

    findings = []
    for finding in _run_checks(config):
        findings.append(finding)
        _print_finding(finding)
    return 1 if worst_level(findings) == "fail" else 0


def _run_checks(config: ClientConfig) -> Iterator[Finding]:
    from nesa_node.cli.services import doctor_checks as checks
    from nesa_node.swarm.p2p.hivemind_imports import P2PD_PATH

    yield from checks.check_versions(REQUIRED_PACKAGES)
    yield from checks.check_p2pd(Path(P2PD_PATH))
    yield from checks.check_devices()
    yield from checks.check_memory_and_disk(config.cache_dir)
    yield from checks.check_listen_ports()
    yield from checks.check_clock()
    yield from checks.check_peers(config)
    if config.model is not None:
        yield from checks.check_model(config, config.model)


def _print_finding(finding: Finding) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, soft_wrap=True)
    line = Text(f"{finding.level:<5}", style=_LEVEL_STYLES[finding.level])
    line.append(f"{finding.subject:<13}", style="default not bold")
    line.append(finding.detail, style="default not bold")
    if finding.level != "ok" and finding.advice:
        line.append(f"\n      {'':12}→ {finding.advice}", style="default not bold")
    console.print(line)
