"""Loading of settings from command line, environment, TOML file and defaults."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.declaration import find_format, read_limited, user_path
from nesa_node.core.settings.models import ALL_CONFIGS, SECRET_FIELDS, SharedConfig

ENV_PREFIX = "NESA_"
CONFIG_VARIABLE = "NESA_CONFIG"
_MAX_FILE_CHARS = 1 << 20

_KNOWN_FIELDS = frozenset(name for config in ALL_CONFIGS for name in config.model_fields)
_COMMANDS_OF_FLAG = {
    "temperature": "generate and chat",
    "top_p": "generate and chat",
    "seed": "generate and chat",
    "chat": "generate",
    "system": "chat",
    "max_length": "chat",
}
"""Names that are flags only, not settings, and the commands that have the flag."""

_Config = TypeVar("_Config", bound=SharedConfig)


@dataclass(frozen=True, slots=True)
class _GivenValue:
    """A setting's value, and the name of its source for error messages."""

    value: object
    source: str


def load_config(
    cls: type[_Config],
    cli: Mapping[str, object],
    env: Mapping[str, str],
    toml_path: Path | None = None,
    on_ignored: Callable[[str, str], None] | None = None,
) -> _Config:
    """Build a `cls`: command line > `NESA_*` variables > TOML file > defaults.

    `cli` maps field names to values; `None` means "not given". `toml_path` falls back to
    `$NESA_CONFIG`, the token to `$HF_TOKEN`. Settings of other commands in the environment or the
    file are ignored; `on_ignored` is called with each and its source. Raises `ConfigError`, which
    names source and key.
    """
    if toml_path is None and env.get(CONFIG_VARIABLE):
        toml_path = user_path(env[CONFIG_VARIABLE])
    given: dict[str, _GivenValue] = {}
    if toml_path is not None:
        given |= _read_toml(toml_path)
    given |= _read_environment(env)
    given |= {
        name: _GivenValue(value, flag_name(name))
        for name, value in cli.items()
        if value is not None
    }
    for name, entry in given.items():
        if on_ignored is not None and name not in cls.model_fields:
            on_ignored(name, entry.source)
    mine = {name: entry.value for name, entry in given.items() if name in cls.model_fields}
    try:
        return cls.model_validate(mine)
    except ValidationError as error:
        raise ConfigError(_format_errors(error, given, cls.model_fields)) from None


def flag_name(name: str) -> str:
    """Command-line name of a field; `MODEL` is the one positional argument."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def _read_toml(path: Path) -> dict[str, _GivenValue]:
    try:
        table = tomllib.loads(read_limited(path, _MAX_FILE_CHARS))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deep") from None
    except ValueError as error:  # also for bytes that are not UTF-8, and a number too long for int
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for key in table:
        if key not in _KNOWN_FIELDS:
            hint = _flag_hint(key) or suggest_name(key, _KNOWN_FIELDS)
            raise ConfigError(f"{path}: unknown key {key!r}{hint}")
    return {key: _GivenValue(value, str(path)) for key, value in table.items()}


def _read_environment(env: Mapping[str, str]) -> dict[str, _GivenValue]:
    given = {}
    if env.get("HF_TOKEN"):
        given["token"] = _GivenValue(env["HF_TOKEN"], "the environment (HF_TOKEN)")
    known = {ENV_PREFIX + name.upper(): name for name in _KNOWN_FIELDS}
    for variable, value in env.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if variable not in known:
            name = variable.removeprefix(ENV_PREFIX).lower()
            hint = _flag_hint(name) or suggest_name(variable, known)
            raise ConfigError(f"unknown environment variable {variable}{hint}")
        given[known[variable]] = _GivenValue(value, f"the environment ({variable})")
    return given


def _flag_hint(key: str) -> str:
    """Hint which commands have `key` as a flag; empty if it is no flag."""
    name = key.replace("-", "_")
    commands = _COMMANDS_OF_FLAG.get(name)
    return f": it is a flag of {commands}; give {flag_name(name)}" if commands else ""


def suggest_name(wrong: str, known: Iterable[str]) -> str:
    """Suggestion `; did you mean 'x'?`, or an empty text when no known name is close."""
    close = difflib.get_close_matches(wrong, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _format_errors(
    error: ValidationError, given: Mapping[str, _GivenValue], fields: Mapping[str, FieldInfo]
) -> str:
    """Error message with one clause per wrong field. Never quotes a secret."""
    wrong: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False, include_context=False):
        name = str(detail["loc"][0]) if detail["loc"] else ""
        wrong.setdefault(name, []).append(detail)
    return "; ".join(
        _format_field_errors(name, details, given.get(name), fields.get(name))
        for name, details in wrong.items()
    )


def _format_field_errors(
    name: str, details: list[ErrorDetails], entry: _GivenValue | None, field: FieldInfo | None
) -> str:
    own = [d["msg"].removeprefix("Value error, ") for d in details if d["type"] == "value_error"]
    if field is None:
        return "; ".join(own)
    value_format = find_format(field)
    expected = value_format and value_format.expected
    if entry is None:
        return f"{flag_name(name)} is required{f': {expected}' if expected else ''}"
    if expected:
        reason = "; ".join((*own[:1], f"expected {expected}"))
    elif own:
        reason = own[0]
    else:
        words = dict.fromkeys(d["msg"].replace("Input should be ", "") for d in details)
        reason = f"expected {' or '.join(words)}"
    value = "" if name in SECRET_FIELDS else f" = {entry.value!r}"
    return f"{name}{value} (from {entry.source}) is wrong: {reason}"
