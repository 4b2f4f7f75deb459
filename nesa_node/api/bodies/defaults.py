"""Default sampling parameters of a model, from its generation_config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from nesa_node.api.bodies.fields import MinP, Repetition, Share, Temperature, TopK
from nesa_node.api.decoding.job import Sampling
from nesa_node.core.logging import get_logger

if TYPE_CHECKING:
    from transformers import GenerationConfig

log = get_logger(__name__)

_KINDS: dict[str, TypeAdapter[Any]] = {
    "temperature": TypeAdapter(Temperature),
    "top_p": TypeAdapter(Share),
    "top_k": TypeAdapter(TopK),
    "min_p": TypeAdapter(MinP),
    "repetition_penalty": TypeAdapter(Repetition),
}


def advised(config: GenerationConfig) -> Sampling:
    """Sampling parameters that `config` sets, and OpenAI's defaults for the rest.

    `do_sample` is ignored: requests get greedy decoding by temperature 0. Values that a request may
    not have are ignored and logged, since these files are not trusted.
    """
    advice: dict[str, Any] = {}
    for name, kind in _KINDS.items():
        value = getattr(config, name, None)
        if value is None:
            continue
        try:
            advice[name] = kind.validate_python(value, strict=True)
        except ValidationError:
            log.warning("default_sampling_field_ignored", field=name, value=repr(value)[:100])
    advice["top_k"] = max(advice.get("top_k", 0), 0)
    return Sampling(**advice)


def told(defaults: Sampling) -> dict[str, float]:
    """Default sampling parameters by name, for `/v1/models` and the log."""
    return {name: getattr(defaults, name) for name in _KINDS}
