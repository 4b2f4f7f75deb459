"""`nesa-node doctor`: checks whether this machine can serve or use a swarm, with advice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nesa_node.cli.flags import Flags, ModelArgument, load_command_config
from nesa_node.core.errors import ConfigError, is_installed

if TYPE_CHECKING:
    from nesa_node.cli.commands.doctor_checks import Finding
    from nesa_node.core.settings.models import ClientConfig

REQUIRED_PACKAGES = ("torch", "transformers", "hivemind")
_LEVEL_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


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
    from nesa_node.cli.commands.doctor_checks import worst_level

    findings = []
    for finding in _run_checks(config):
        findings.append(finding)
        _print_finding(finding)
    return 1 if worst_level(findings) == "fail" else 0


def _run_checks(config: ClientConfig) -> Iterator[Finding]:
    from nesa_node.cli.commands import doctor_checks as checks
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
