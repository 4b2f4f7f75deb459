"""Declaration of a setting: its field and flag, default paths, and a check that servers share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr

from nesa_node.core.settings.choices import FlagGroup
from nesa_node.core.settings.http_address import HttpAddress
from nesa_node.core.settings.user_file import user_path


def default_cache_dir() -> Path:
    return _user_dir("XDG_CACHE_HOME", "~/.cache")


def default_decisions_path() -> Path:
    return _state_dir() / "decisions.db"


def default_snapshots_dir() -> Path:
    return _state_dir() / "snapshots"


def default_keys_path() -> Path:
    return _state_dir() / "keys.json"


def default_known_swarms_dir() -> Path:
    return _state_dir() / "swarms"


def default_identity_path() -> Path:
    return _user_dir("XDG_CONFIG_HOME", "~/.config") / "identity.key"


def _state_dir() -> Path:
    return _user_dir("XDG_STATE_HOME", "~/.local/state")


def _user_dir(variable: str, default: str) -> Path:
    """Our folder in that of the XDG base directory specification."""
    return Path(os.environ.get(variable) or user_path(default)) / "nesa-node"


def setting(
    default: object | Callable[[], object],
    group: FlagGroup,
    text: str,
    *,
    basic: bool = False,
    default_text: str | None = None,
    alias: str | None = None,
) -> Any:
    """A field that is a flag, too: `text` is its help, `group` its heading there.

    `basic` flags are in the short help. `default_text` replaces the default that help shows.
    """
    flag = {"group": group, "basic": basic, "default_text": default_text, "alias": alias}
    if callable(default):
        return Field(default_factory=default, description=text, json_schema_extra=dict(flag))
    return Field(default, description=text, json_schema_extra=dict(flag))


def check_loopback(name: str, address: str | None, example: str, *, allowed: bool) -> None:
    """Raise `ValueError` if other machines could reach an unprotected server at `address`."""
    if address is None or HttpAddress.parse(address).is_loopback or allowed:
        return
    raise ValueError(
        f"{name} {address} can be reached from other machines, without a password; give a loopback "
        f"address such as {example}, or set {name}_beyond_loopback"
    )


def secret_text(value: SecretStr | None) -> str | None:
    """The secret as plain text."""
    return None if value is None else value.get_secret_value()
