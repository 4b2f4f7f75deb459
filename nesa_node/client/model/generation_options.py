"""Checks of options of `generate` and `forward`: unsupported ones, and plain greedy search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
)

from nesa_node.client.model.inference_session import StopCondition
from nesa_node.core.errors import UnsupportedFeatureError

_FORWARD_ADVICE = {
    "inputs_embeds": "pass input_ids, or hidden states to inference_session().step()",
    "position_ids": "positions count each row's unmasked tokens: pass an attention_mask instead",
    "labels": "take the logits and compute the loss from them",
    "output_attentions": "attention weights stay on the nodes: load the model locally to see them",
    "output_router_logits": "router logits stay on the nodes: load the model locally to see them",
}

HIDDEN_STATES_NEED_WHOLE_TEXTS = (
    "output_hidden_states is not supported with past_key_values: a session's nodes send only what "
    "their last block returns. Call model(input_ids, output_hidden_states=True) with the whole text"
)

_PASSED_ON_BY_GENERATE = ("tokenizer", "assistant_tokenizer")

_SUPPORTED_MODES = frozenset(
    {
        GenerationMode.GREEDY_SEARCH,
        GenerationMode.SAMPLE,
        GenerationMode.ASSISTED_GENERATION,
        GenerationMode.BEAM_SEARCH,
        GenerationMode.BEAM_SAMPLE,
    }
)

_HIDDEN_STATES_MODES = frozenset({GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE})

_OPTION_ADVICE = {
    "cache_implementation": "leave it out, the nodes hold the cache",
    "guidance_scale": "generate without classifier-free guidance",
    "assistant_early_exit": "pass an assistant_model or prompt_lookup_num_tokens",
    "use_mtp": "pass an assistant_model or prompt_lookup_num_tokens",
    "speculation_type": "pass an assistant_model or prompt_lookup_num_tokens",
    "dola_layers": "use greedy search or sampling",
    "compile_config": "leave it out, the client has nothing to compile",
    "output_attentions": _FORWARD_ADVICE["output_attentions"],
}

_ALLOWED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "cache_implementation": ("dynamic",),
    "guidance_scale": (1, 1.0),
}


def refuse_forward_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise `UnsupportedFeatureError` for an argument of `forward` that would change its result.

    None and False are accepted. Unknown arguments raise `TypeError`.
    """
    for name, value in arguments.items():
        if value is None or value is False or name in _PASSED_ON_BY_GENERATE:
            continue
        if name not in _FORWARD_ADVICE:
            raise TypeError(f"forward() got an unexpected argument {name!r}")
        raise UnsupportedFeatureError(
            f"{name} is not supported by a distributed model: {_FORWARD_ADVICE[name]}"
        )


def refuse_generation_options(config: GenerationConfig) -> None:
    """Raise `UnsupportedFeatureError` for an option of `generate` that a swarm does not support."""
    mode = config.get_generation_mode()
    if mode not in _SUPPORTED_MODES:
        name = mode.value.replace("_", " ")
        raise UnsupportedFeatureError(
            f"{name} is not supported by a distributed model: use greedy search "
            "(do_sample=False), sampling (do_sample=True) or beam search (num_beams)"
        )
    if config.output_hidden_states and mode not in _HIDDEN_STATES_MODES:
        raise UnsupportedFeatureError(
            f"output_hidden_states is not supported by {mode.value.replace('_', ' ')}: generate "
            "without it, then call model(sequences, output_hidden_states=True)"
        )
    for option, advice in _OPTION_ADVICE.items():
        value = getattr(config, option, None)
        if value in (None, False) or value in _ALLOWED_VALUES.get(option, ()):
            continue
        raise UnsupportedFeatureError(
            f"{option}={value!r} is not supported by a distributed model: {advice}"
        )


def find_stop_condition(
    config: GenerationConfig,
    processors: Iterable[LogitsProcessor],
    criteria: Iterable[StoppingCriteria],
    prompt_columns: int,
) -> StopCondition | None:
    """The stop condition of plain greedy search; None if `generate` is asked for anything else."""
    if config.do_sample or config.return_dict_in_generate or config.is_assistant:
        return None
    most: list[int] = []
    least: list[int] = [0]
    stops: list[frozenset[int]] = []
    for one in criteria:
        # Exact types: subclasses may behave differently.
        if type(one) is MaxLengthCriteria:
            most.append(one.max_length - prompt_columns)
        elif type(one) is EosTokenCriteria:
            stops.append(_ids(one.eos_token_id))
        else:
            return None
    for processor in processors:
        if type(processor) is MinLengthLogitsProcessor:
            least.append(processor.min_length - prompt_columns)
        elif type(processor) is MinNewTokensLengthLogitsProcessor:
            least.append(
                processor.min_new_tokens + processor.prompt_length_to_skip - prompt_columns
            )
        else:
            return None
        stops.append(_ids(processor.eos_token_id))
    if not most or len(set(stops)) > 1:
        return None
    return StopCondition(min(most), max(least), stops[0] if stops else frozenset())


def _ids(tokens: torch.Tensor) -> frozenset[int]:
    return frozenset(tokens.flatten().tolist())
