"""Specs that a client sends: within their bounds, and what PEFT makes of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nesa_node.core.errors import ConfigError
from nesa_node.engine.training.training_spec import MAX_PATTERNS, TrainingSpec

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8.0, "modules": ["q_proj"]}
RANKS = {f"m{number}": 1 for number in range(MAX_PATTERNS)}


def read(**fields: Any) -> TrainingSpec:
    return TrainingSpec.decode(msgspec.msgpack.encode({"optimizer": {}, "seed": 1} | fields))


@pytest.mark.parametrize(
    "lora",
    [
        LORA | {"modules": ["q_proj\n"]},
        LORA | {"modules": ["(a+)+"]},
        LORA | {"rank_pattern": RANKS | {"one.more": 1}},
        LORA | {"alpha_pattern": RANKS | {"one.more": 1}},
        LORA | {"lora_alpha": float("nan")},
        LORA | {"r": 10**9},
    ],
)
def test_spec_out_of_bounds_is_refused(lora: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no training spec"):
        read(lora=lora)
    assert read(lora=LORA | {"rank_pattern": RANKS}).lora is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"ia3": {"modules": ["q_proj"], "feedforward_modules": ["k_proj"]}},
        {"lora": LORA | {"modules": ["all-linear"], "layers_to_transform": [1]}},
    ],
)
def test_what_peft_refuses_is_an_error_of_the_spec(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="PEFT refuses"):
        read(**fields).make_config()
