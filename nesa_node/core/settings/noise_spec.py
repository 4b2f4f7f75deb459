"""`--private noise:EPS,DELTA,CLIP`: noise that clients put into the hidden states they send."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self, get_args

from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.choices import PrivacyName

_PREFIX = "noise:"
PRIVATE_FORMAT = (
    f"{', '.join(get_args(PrivacyName))}, or noise:EPS,DELTA,CLIP like noise:200,1e-5,30"
)


@dataclass(frozen=True, slots=True)
class NoiseSpec:
    """Each hidden state is scaled to a norm of at most `clip`, and gets normal noise.

    The noise makes each (`epsilon`, `delta`)-differentially private.
    """

    epsilon: float
    delta: float
    clip: float

    def __str__(self) -> str:
        return f"{_PREFIX}{self.epsilon:g},{self.delta:g},{self.clip:g}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None for another way of `--private`. Raises `ConfigError`."""
        if not text.startswith(_PREFIX):
            return None
        try:
            epsilon, delta, clip = map(float, text.removeprefix(_PREFIX).split(","))
        except ValueError:
            raise ConfigError(f"{text}: give three numbers, as in noise:200,1e-5,30") from None
        if not (0 < epsilon <= 1e6 and 0 < delta < 1 and 0 < clip < math.inf):
            raise ConfigError(
                f"{text}: EPS must be above 0 and at most 1e6, DELTA between 0 and 1, CLIP above 0"
            )
        return cls(epsilon, delta, clip)


def check_private(text: str) -> str:
    """`text` if it is a way of `--private`. Raises `ConfigError` otherwise."""
    if text not in get_args(PrivacyName) and NoiseSpec.parse(text) is None:
        raise ConfigError(f"unknown private={text!r}: give {PRIVATE_FORMAT}")
    return text
