"""Files that users name: expansion of `~`, and reading with a size limit."""

from __future__ import annotations

from pathlib import Path

from nesa_node.core.errors import ConfigError


def user_path(path: str | Path) -> Path:
    """`path` with `~` and `~name` expanded. Raises `ConfigError` for an unknown home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise ConfigError(f"no home folder is known for {user}: give a path without it") from None


def read_limited(path: Path, most_chars: int) -> str:
    """Read a UTF-8 file. Raises `OSError`, `UnicodeDecodeError`, and `ConfigError` if it is longer.

    The limit applies while reading: devices and pipes report no size and may be endless.
    """
    with path.open(encoding="utf-8") as file:
        text = file.read(most_chars + 1)
    if len(text) > most_chars:
        raise ConfigError(f"{path} has more than {most_chars} characters")
    return text
