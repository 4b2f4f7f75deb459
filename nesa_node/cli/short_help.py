"""Short and full help: `--help` shows the flags that most users need, `--help-all` all flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from cyclopts.help import DefaultFormatter

from nesa_node.cli.flags import DashboardFlags, GatewayFlags
from nesa_node.cli.peer_flags import NodeFlags

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

ALL = "--help-all"
BASIC = frozenset(
    {
        "initial_peers",
        "swarm_key",
        "config",
        "log_level",
        "device",
        "torch_dtype",
        "threads",
        "num_blocks",
        "block_indices",
        "quant_type",
        "host_maddrs",
        "public_name",
        "api",
        "orchestrator",
        "http",
        "listen",
        "api_key",
        "models",
        "route",
        "quality",
        "max_new_tokens",
    }
)
"""Shared settings that `--help` shows. A command's own flags are always shown."""


def _names(field_names: Sequence[str]) -> frozenset[str]:
    return frozenset(f"--{name.replace('_', '-')}" for name in field_names)


_SHARED = _names(
    [field.name for flags in (NodeFlags, GatewayFlags, DashboardFlags) for field in fields(flags)]
)
_ADVANCED = _SHARED - _names(sorted(BASIC)) | {"--trust"}


class ShortFormatter(DefaultFormatter):
    """Help formatter that omits advanced flags, and panels that have only those."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        shown = [entry for entry in panel.entries if not _ADVANCED.intersection(entry.names)]
        if shown:
            super().__call__(console, options, panel.copy(entries=shown))


def formatter_for(tokens: Sequence[str]) -> tuple[DefaultFormatter, Sequence[str]]:
    """Choose the formatter, and replace `--help-all` in `tokens` by `--help`."""
    flags = tokens[: tokens.index("--")] if "--" in tokens else tokens
    if ALL not in flags:
        return ShortFormatter(), tokens
    return DefaultFormatter(), ["--help" if token == ALL else token for token in tokens]
