"""Flags of commands: those made from the fields of settings models, and those for sampling.

Values stay text here: `core/settings/models.py` validates them, so that errors of flags, variables
and file keys read alike. A flag that is not given is missing in the dictionary.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
)

from cyclopts import Group, Parameter

from nesa_node.cli.process_setup import exit_on_interrupt
from nesa_node.core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from nesa_node.core.settings.models import AnswerConfig, SharedConfig


SWARM = Group("Swarm", sort_key=10)
COMPUTE = Group("Model and device", sort_key=20)
POOL = Group("Pool", sort_key=22)
ORCHESTRATION = Group("Orchestration", sort_key=25)
ACCESS = Group("Access", sort_key=27)
LIMITS = Group("Limits", sort_key=30)
SAMPLING = Group("Sampling", sort_key=35)
OUTPUT = Group("Output", sort_key=40)
FLAG_GROUPS = {
    group.name: group
    for group in (SWARM, COMPUTE, POOL, ORCHESTRATION, ACCESS, LIMITS, SAMPLING, OUTPUT)
}

ModelArgument = Annotated[
    str | None, Parameter(help="A local folder, or the name of a model on the hub.")
]

JsonFlag = Annotated[bool, Parameter(name="--json", negative=(), group=OUTPUT, help="Print JSON.")]

_Config = TypeVar("_Config", bound="SharedConfig")


class Flags(dict[str, Any], Generic[_Config]):
    """Annotation of a command's parameter: the flags of a settings model, given by its name.

    `Flags["NodeConfig"]` is evaluated when the parser or the help needs this command's parameters,
    so that the help of the application imports neither the models nor pydantic.
    """

    def __class_getitem__(cls, name: str) -> Any:
        return _make_flags(name)


@cache
def _make_flags(config_name: str) -> Any:
    # The first use of pydantic, which swallows a `KeyboardInterrupt` while it builds a model.
    with exit_on_interrupt():
        from nesa_node.core.settings import models

    config: type[SharedConfig] = getattr(models, config_name)
    flags: dict[str, Any] = {
        "config": Annotated[Path, Parameter(group=OUTPUT, help=config.file_help)]
    }
    for name, field in config.model_fields.items():
        if isinstance(field.json_schema_extra, dict):
            flags[name] = _make_flag(field, field.json_schema_extra)
    make_type: Any = TypedDict
    return Annotated[make_type(config_name, flags, total=False), Parameter(name="*")]


def _make_flag(field: FieldInfo, extra: dict[str, Any]) -> Any:
    from nesa_node.core.settings.declaration import find_format

    value_format = find_format(field)
    # Choices that have other spellings, too, are left to the model.
    is_choice = get_origin(field.annotation) is Literal
    default = extra["default_text"] or _default_text(field.default)
    words = (field.description, f"[default: {default}]" if default else "")
    return Annotated[
        str if value_format is not None and is_choice else _text_type(field.annotation),
        Parameter(
            group=FLAG_GROUPS[extra["group"]],
            metavar=None if value_format is None else value_format.metavar,
            alias=extra["alias"],
            negative=None if field.default is True else (),
            help=" ".join(filter(None, words)),
        ),
    ]


def _default_text(default: object) -> str:
    if default is True:
        return "yes"
    if isinstance(default, tuple):
        return " ".join(default)
    return str(default) if default else ""


def _text_type(annotation: Any) -> Any:
    """The type that the parser reads: choices, a boolean, a list of texts or a text."""
    if NoneType in get_args(annotation):
        annotation = next(kind for kind in get_args(annotation) if kind is not NoneType)
    if annotation is bool or get_origin(annotation) is Literal:
        return annotation
    return tuple[str, ...] if get_origin(annotation) is tuple else str


@cache
def advanced_flags() -> frozenset[str]:
    """Names of the flags of settings that only `--help-all` shows."""
    from nesa_node.core.settings.models import ALL_CONFIGS

    names = set()
    for config in ALL_CONFIGS:
        for name, field in config.model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and not extra["basic"]:
                names.add(f"--{name.replace('_', '-')}")
                if extra["alias"]:
                    names.add(str(extra["alias"]))
    return frozenset(names)


def load_command_config(
    cls: type[_Config],
    flags: Flags[Any] | None,
    on_ignored: Callable[[str, str], None] | None = None,
    **more: object,
) -> _Config:
    """Load a command's config from `flags`, fields given as `more`, environment and file.

    `on_ignored` is passed to `load_config`. Also sets up logging and tracing. Raises `ConfigError`,
    and `InsufficientMemoryError` if `ulimit -v` is too low.
    """
    from nesa_node.cli.process_setup import check_address_space

    check_address_space()
    from nesa_node.core.logging import setup_logging
    from nesa_node.core.settings.sources import load_config

    given = dict(flags or {})
    toml_path = given.pop("config", None)
    config = load_config(cls, given | more, os.environ, toml_path, on_ignored)
    setup_logging(config.log_level, config.log_format)
    if config.otel_endpoint is not None:
        from nesa_node.cli.services.trace_export import start_tracing

        start_tracing(
            config.otel_endpoint, config.trace_service, getattr(config, "public_name", None)
        )
    return config


MAX_SEED = 2**63
"""Exclusive bound of a seed that torch accepts."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    temperature: Annotated[
        float | None, Parameter(group=SAMPLING, help="Sample; higher is more varied.")
    ] = None
    top_p: Annotated[
        float | None,
        Parameter(group=SAMPLING, help="Sample from the likeliest tokens of this probability."),
    ] = None
    seed: Annotated[int | None, Parameter(group=SAMPLING, help="Make sampling repeatable.")] = None

    def check(self) -> dict[str, Any]:
        """Validate and return the values, keyword arguments of `GenerationParams`.

        Raises `ConfigError` for values out of range.
        """
        if self.temperature is not None and not 0 < self.temperature <= 100:
            raise ConfigError("--temperature must lie in (0, 100]; leave it away for greedy")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError("--top-p must lie in (0, 1]")
        if self.seed is not None and not 0 <= self.seed < MAX_SEED:
            raise ConfigError(f"--seed must lie in [0, {MAX_SEED})")
        return asdict(self)


def load_answer_config(
    flags: Flags["AnswerConfig"] | None, model: str | None, max_new_tokens: int | None
) -> AnswerConfig:
    """Load the config as `load_command_config` does. Raises `ConfigError`, also for
    --max-new-tokens below 1.

    Warns if only the gateway's setting `max_new_tokens` is given, which these commands ignore.
    """
    from nesa_node.core.settings.models import AnswerConfig

    if max_new_tokens is not None and max_new_tokens < 1:
        raise ConfigError("--max-new-tokens must be at least 1")
    on_ignored = _warn_ignored_limit if max_new_tokens is None else None
    return load_command_config(AnswerConfig, flags, on_ignored, model=model)


def _warn_ignored_limit(name: str, source: str) -> None:
    if name == "max_new_tokens":
        print(
            f"warning: max_new_tokens (from {source}) limits the answers of gateways only; here "
            "give --max-new-tokens",
            file=sys.stderr,
        )
