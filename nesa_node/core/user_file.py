"""Files that a user names: `~` is a home folder, and what is read of one has a limit."""

from __future__ import annotations

from pathlib import Path

from nesa_node.core.errors import ConfigError


def user_path(path: str | Path) -> Path:
    """`path` with `~` and `~name` replaced. Raises `ConfigError` where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise ConfigError(f"no home folder is known for {user}: give a path without it") from None


def read_limited(path: Path, most_chars: int) -> str:
    """The text of a UTF-8 file. Raises `OSError`, `UnicodeDecodeError`, and `ConfigError` where
    there is more: a device or a pipe may have no end, whatever size the system tells.
    """
    with path.open(encoding="utf-8") as file:
        text = file.read(most_chars + 1)
    if len(text) > most_chars:
        raise ConfigError(f"{path} has more than {most_chars} characters")
    return text
