"""Sampling flags of `generate` and `chat`, which are no settings, and the config of both."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from nesa_node.cli.flags import SAMPLING, Flags, load_command_config
from nesa_node.core.errors import ConfigError

if TYPE_CHECKING:
    from nesa_node.core.settings.models import AnswerConfig


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
