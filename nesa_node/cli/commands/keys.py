"""`nesa-node keys add|list|revoke`: management of a gateway's API keys."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from nesa_node.cli.flags import ACCESS, OUTPUT, JsonFlag
from nesa_node.core.errors import ConfigError

if TYPE_CHECKING:
    from nesa_node.web.key_store import KeyStore, StoredKey

_DAY_S = 86_400
_MAX_EXPIRY_DAYS = 36_500

keys = App(name="keys", help="Create, list and revoke API keys of a gateway.")

_KeysPath = Annotated[
    str | None,
    Parameter(
        metavar="PATH",
        group=ACCESS,
        help="File of the keys. [default: ~/.local/state/nesa-node/keys.json]",
    ),
]
_ConfigPath = Annotated[
    Path | None, Parameter(group=OUTPUT, help="TOML file of settings, such as keys_path.")
]
_LimitFlag = Annotated[int | None, Parameter(group=ACCESS)]


@keys.command
def add(
    name: Annotated[str, Parameter(help="Name of the key's holder, shown in logs and lists.")],
    /,
    *,
    requests_per_min: _LimitFlag = None,
    tokens_per_min: _LimitFlag = None,
    concurrent: Annotated[
        int | None, Parameter(group=ACCESS, help="Most concurrent requests.")
    ] = None,
    expires_days: Annotated[
        float | None, Parameter(group=ACCESS, help="Days until it expires. [default: never]")
    ] = None,
    keys_path: _KeysPath = None,
    config: _ConfigPath = None,
) -> int:
    """Create a key and print it, once: only its hash is stored."""
    from nesa_node.web.key_store import KeyLimits

    for flag, value in (
        ("--requests-per-min", requests_per_min),
        ("--tokens-per-min", tokens_per_min),
        ("--concurrent", concurrent),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be at least 1; leave it away for no limit")
    if expires_days is not None and not 0 < expires_days <= _MAX_EXPIRY_DAYS:
        raise ConfigError(f"--expires-days must lie in (0, {_MAX_EXPIRY_DAYS}]")
    if not 1 <= len(name) <= 64 or not name.isprintable() or not name.strip():
        raise ConfigError(f"{name!r} is no name of 1 to 64 printable characters")
    limits = KeyLimits(
        requests_per_minute=requests_per_min,
        tokens_per_minute=tokens_per_min,
        concurrent_requests=concurrent,
    )
    ends_at = None if expires_days is None else time.time() + expires_days * _DAY_S
    store = _open_store(keys_path, config)
    made, secret = store.add(name, limits, ends_at)
    print(
        f"key {made.id} for {made.name}, kept as a hash in {store.path}; it is shown only now:",
        file=sys.stderr,
    )
    print(secret)
    return 0


@keys.command(name="list")
def list_keys(
    *,
    as_json: JsonFlag = False,
    keys_path: _KeysPath = None,
    config: _ConfigPath = None,
) -> int:
    """Show all keys: names, last use, expiry and limits."""
    store = _open_store(keys_path, config)
    found = store.read_all()
    if as_json:
        shown = [
            {**key.model_dump(exclude={"sha256"}), "expired": key.has_expired(time.time())}
            for key in found
        ]
        json.dump(shown, sys.stdout, indent=2)
        print()
    elif found:
        _print_table(found)
    elif store.has_had_keys:
        print("no keys: the gateway refuses all requests; make one with `nesa-node keys add NAME`")
    else:
        print("no keys: make one with `nesa-node keys add NAME`")
    return 0


@keys.command
def revoke(
    key: Annotated[str, Parameter(help="Id or name as listed, or the key itself.")],
    /,
    *,
    keys_path: _KeysPath = None,
    config: _ConfigPath = None,
) -> int:
    """Revoke a key. Running gateways refuse it within two seconds."""
    store = _open_store(keys_path, config)
    gone = store.revoke(key)
    print(f"revoked {gone.id} ({gone.name})")
    if not store.read_all():
        print(
            f"no key is left, so the gateway refuses all requests; to serve without keys, delete "
            f"{store.path} and restart it"
        )
    return 0


def _open_store(keys_path: str | None, config_path: Path | None) -> KeyStore:
    from nesa_node.core.logging import setup_logging
    from nesa_node.core.settings.models import AccessConfig
    from nesa_node.core.settings.sources import load_config
    from nesa_node.web.key_store import KeyStore

    config = load_config(AccessConfig, {"keys_path": keys_path}, os.environ, config_path)
    setup_logging(config.log_level, config.log_format)
    return KeyStore(config.keys_path)


def _print_table(found: tuple[StoredKey, ...]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in ("id", "name", "made", "last used", "expires", "limits"):
        table.add_column(title, overflow="fold")
    for key in found:
        cells = (
            key.id,
            key.name,
            _format_day(key.created_at),
            "never" if key.used_at is None else _format_minute(key.used_at),
            "never" if key.expires_at is None else _format_day(key.expires_at),
            _format_limits(key),
        )
        table.add_row(*map(Text, cells), style="dim" if key.has_expired(time.time()) else None)
    width = None if sys.stdout.isatty() else 160
    Console(width=width, highlight=False).print(table)


def _format_day(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(at))


def _format_minute(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _format_limits(key: StoredKey) -> str:
    limits = (
        (key.requests_per_minute, "requests/min"),
        (key.tokens_per_minute, "tokens/min"),
        (key.concurrent_requests, "at once"),
    )
    parts = [f"{count} {what}" for count, what in limits if count is not None]
    return ", ".join(parts) or "none of its own"
