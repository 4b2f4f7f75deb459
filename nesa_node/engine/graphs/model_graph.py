"""Models of transformers and diffusers of their config alone, their inputs and their graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from nesa_node.core.errors import (
    ConfigError,
    CorruptCheckpointError,
    UnsupportedFeatureError,
    UnsupportedModelError,
    is_installed,
)
from nesa_node.core.logging import get_logger
from nesa_node.engine.graphs.decoder_cache import capture_with_cache, is_generating
from nesa_node.engine.graphs.text_to_image import PipelineNetworks, divide_graph
from nesa_node.engine.weights.families import check_counts, parse_config, read_raw_config
from nesa_node.engine.weights.model_tree import initializer_lock
from nesa_node.engine.weights.pipeline_folder import (
    DECODER,
    DENOISERS,
    is_pipeline,
    read_pipeline_index,
)
from nesa_node.sharding.capture import CapturedModel, capture

log = get_logger(__name__)

_TIME_IDS = 6
"""Numbers of sizes and crops that SDXL's networks get."""
MAX_SIDE = 16_384
"""Pixels, or latents, that a network may be captured for."""
_SAMPLES = 16_000
"""Of audio, a second as most networks take it."""


@dataclass(frozen=True, slots=True)
class RequestSizes:
    """How large a request is."""

    batch: int = 1
    tokens: int = 128
    """Of a text, at most what the model has positions for."""
    image_size: int | None = None
    """Pixels of each side; None for what the config says, or 224."""


def capture_model(
    folder: Path,
    *,
    name: str,
    dtype: torch.dtype,
    sizes: RequestSizes,
    without_memory: bool = True,
) -> CapturedModel:
    """The graph of one forward pass of the model in `folder`; no weights are read.

    On the meta device, which a model larger than this machine needs, or without `without_memory`
    as nodes capture it: there the graph may differ in its smallest operations.

    Raises as `make_model` does, and `UnsupportedFeatureError` where the model's course depends on
    values.
    """
    with torch.device("meta" if without_memory else "cpu"):
        return capture_network(make_model(folder, name=name, dtype=dtype), sizes)


def capture_network(model: nn.Module, sizes: RequestSizes) -> CapturedModel:
    """The graph of one forward pass, of a decoder's from any earlier token on.

    Raises as `example_inputs` and `capture` do.
    """
    inputs = example_inputs(model, sizes)
    if is_generating(model):
        assert isinstance(model, PreTrainedModel)
        try:
            return capture_with_cache(model, inputs)
        except UnsupportedFeatureError as error:
            log.info("captured_without_cache", reason=str(error))
    captured = capture(model, (), inputs)
    if isinstance(model, PipelineNetworks):
        return divide_graph(captured, [name for name, _ in model.named_children()])
    return captured


def make_model(folder: Path, *, name: str, dtype: torch.dtype) -> nn.Module:
    """The model of the `config.json` in `folder`, with weights of any values, in evaluation.

    Of transformers it is the first of its `architectures`, of diffusers its `_class_name`, and of a
    folder of several networks `PipelineNetworks`. Its weights are never written to, so that on the
    CPU they take addresses, but no memory. Code in a checkpoint is never run. Raises
    `ModelNotFoundError`, `CorruptCheckpointError`, `UnsupportedModelError` for what neither library
    has a class for, and `ConfigError` without diffusers.
    """
    if is_pipeline(folder):
        parts = read_pipeline_index(folder, name=name).parts
        networks = {
            part: make_model(folder / part, name=f"{name}/{part}", dtype=dtype) for part in parts
        }
        return PipelineNetworks(networks)
    raw = read_raw_config(folder, name=name)
    check_counts(raw, folder / "config.json")
    with initializer_lock, init.no_init_weights():
        if "_class_name" in raw:
            model = _make_diffusion_model(raw, name, dtype)
        else:
            model = _make_transformers_model(folder, raw, name, dtype)
    return model.eval().requires_grad_(False)


def _make_transformers_model(
    folder: Path, raw: Mapping[str, Any], name: str, dtype: torch.dtype
) -> nn.Module:
    if "model_type" not in raw:
        raise UnsupportedModelError(f"{name}: {folder / 'config.json'} has no model_type")
    config = parse_config(folder)
    model_class: Any = _find_class(config, name)
    try:
        model: PreTrainedModel = model_class._from_config(config, dtype=dtype)
        model.tie_weights()  # which is a part of the initialization that is left out
        return model
    except (TypeError, ValueError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        raise CorruptCheckpointError(
            f"{folder / 'config.json'}: {model_class.__name__} cannot be made of it ({error})"
        ) from error


def _find_class(config: PreTrainedConfig, name: str) -> type[PreTrainedModel]:
    architectures = config.architectures or ()
    for architecture in architectures:
        found = getattr(transformers, str(architecture), None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    raise UnsupportedModelError(
        f"{name}: transformers has no class {', '.join(map(str, architectures)) or '(none named)'}"
        "; its config.json names it under architectures"
    )


def example_inputs(model: nn.Module, sizes: RequestSizes) -> dict[str, Any]:
    """Zeros of the shapes that a model takes, on the default device.

    Raises `UnsupportedModelError` for a model of inputs that are not known here.
    """
    if isinstance(model, PipelineNetworks):
        try:
            return {"parts": _pipeline_inputs(model, sizes)}
        except (KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
            raise UnsupportedModelError(
                f"a pipeline of {', '.join(type(each).__name__ for each in model.children())} "
                f"cannot be served ({error!r})"
            ) from error
    if isinstance(model, PreTrainedModel):
        return _transformers_inputs(model, sizes)
    return _diffusion_inputs(model, sizes)


def _transformers_inputs(model: PreTrainedModel, sizes: RequestSizes) -> dict[str, Any]:
    config, dtype = model.config, model.dtype
    accepted = signature(model.forward).parameters
    text = _part(config, "text_config", "decoder")
    most = getattr(text, "max_position_embeddings", None) or sizes.tokens
    ids = torch.zeros(sizes.batch, min(sizes.tokens, most), dtype=torch.long)
    vision = _part(config, "vision_config", "encoder")
    given: dict[str, Any] = {}
    mask_BT: torch.Tensor | None = None
    main = model.main_input_name
    if main == "input_features":
        features_BMF = sizes.batch, config.num_mel_bins, 2 * config.max_source_positions
        given[main] = torch.zeros(*features_BMF, dtype=dtype)
        mask_BT = torch.ones(sizes.batch, features_BMF[-1], dtype=torch.long)
    elif main == "input_values":
        given[main] = torch.zeros(sizes.batch, _SAMPLES, dtype=dtype)
        mask_BT = torch.ones(sizes.batch, _SAMPLES, dtype=torch.long)
    elif main == "pixel_values" or "pixel_values" in accepted:
        size = sizes.image_size or _image_size(vision)
        image_BCHW = sizes.batch, getattr(vision, "num_channels", 3), size, size
        given["pixel_values"] = torch.zeros(*image_BCHW, dtype=dtype)
        if "pixel_mask" in accepted:
            given["pixel_mask"] = torch.ones(sizes.batch, size, size, dtype=torch.long)
    if main == "input_ids" or (main == "pixel_values" and "input_ids" in accepted):
        given["input_ids"] = ids
        mask_BT = torch.ones_like(ids)
        if "token_type_ids" in accepted and getattr(text, "type_vocab_size", 0) > 1:
            given["token_type_ids"] = torch.zeros_like(ids)
    if mask_BT is not None and "attention_mask" in accepted:
        given["attention_mask"] = mask_BT
    if main not in given:
        raise UnsupportedModelError(
            f"{type(model).__name__} takes {main}: models of input_ids, pixel_values, "
            "input_features and input_values can be planned"
        )
    if "decoder_input_ids" in accepted:
        given["decoder_input_ids"] = ids
    if "use_cache" in accepted:
        given["use_cache"] = False
    return given


def _part(config: Any, *names: str) -> Any:
    """The config of one half of a model, or its own."""
    found = (getattr(config, name, None) for name in names)
    return next((each for each in found if isinstance(each, PreTrainedConfig)), config)


def _image_size(config: Any) -> int:
    size = getattr(config, "image_size", None)
    if isinstance(size, list | tuple):
        size = max(size)
    return size if isinstance(size, int) else 224


def _make_diffusion_model(raw: Mapping[str, Any], name: str, dtype: torch.dtype) -> nn.Module:
    if not is_installed("diffusers"):
        raise ConfigError(
            f"{name} is a model of diffusers: pip install 'nesa-node[images]' (the extra `images`)"
        )
    import diffusers

    found = getattr(diffusers, str(raw["_class_name"]), None)
    if not (isinstance(found, type) and issubclass(found, diffusers.ModelMixin)):
        raise UnsupportedModelError(f"{name}: diffusers has no model {raw['_class_name']}")
    diffusion_class: Any = found
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = diffusion_class.from_config(dict(raw))
    except Exception as error:
        # diffusers checks configs with exceptions of many types.
        raise CorruptCheckpointError(
            f"{name}: {found.__name__} cannot be made of its config.json ({error})"
        ) from error
    finally:
        torch.set_default_dtype(usual)
    assert isinstance(model, nn.Module)
    return model


def _pipeline_inputs(networks: PipelineNetworks, sizes: RequestSizes) -> dict[str, dict[str, Any]]:
    """Of a text, of one step of denoising, and of latents that become a picture."""
    found: dict[str, dict[str, Any]] = {}
    decoder: Any = networks.get_submodule(DECODER)
    if sizes.image_size is not None:
        scale = 2 ** (len(decoder.config.get("block_out_channels", ())) - 1)
        sizes = replace(sizes, image_size=max(sizes.image_size // scale, 1))
    for name, network in networks.named_children():
        if name == DECODER:
            continue
        if isinstance(network, PreTrainedModel) == (name in DENOISERS):
            raise TypeError(f"{name} is a {type(network).__name__}")
        found[name] = example_inputs(network, sizes)
        if isinstance(network, PreTrainedModel) and "clip" in network.config.model_type:
            found[name].pop("attention_mask", None)  # which no pipeline gives
    denoiser = next(found[name] for name in DENOISERS if name in found)
    image_BCHW = denoiser["sample"] if "sample" in denoiser else denoiser["hidden_states"]
    shape = sizes.batch, decoder.config["latent_channels"], *image_BCHW.shape[2:]
    return {**found, DECODER: {"latents": torch.zeros(shape, dtype=decoder.dtype)}}


def _diffusion_inputs(model: Any, sizes: RequestSizes) -> dict[str, Any]:
    """Of one step of denoising, or an image."""
    config, dtype = model.config, model.dtype
    size = sizes.image_size or config.get("sample_size") or 64
    sides = size if isinstance(size, list | tuple) else (size, size)
    if not all(isinstance(side, int) and 1 <= side <= MAX_SIDE for side in sides):
        raise UnsupportedModelError(
            f"{type(model).__name__}: sides of {size}; 1 to {MAX_SIDE} can be served"
        )
    height, width = size if isinstance(size, list | tuple) else (size, size)
    image_BCHW = sizes.batch, config.get("in_channels", 4), height, width
    features = config.get("joint_attention_dim") or config.get("cross_attention_dim") or 768
    shapes: dict[str, tuple[int, ...]] = {
        "sample": image_BCHW,
        "hidden_states": image_BCHW,
        "timestep": (sizes.batch,),
        "encoder_hidden_states": (sizes.batch, sizes.tokens, features),
        "pooled_projections": (sizes.batch, config.get("pooled_projection_dim", features)),
    }
    accepted = signature(model.forward).parameters
    needed = {key for key, each in accepted.items() if each.default is Parameter.empty}
    if missing := needed - shapes.keys() - {"kwargs", "args"}:
        raise UnsupportedModelError(
            f"{type(model).__name__} takes {', '.join(sorted(missing))}: models of "
            f"{', '.join(shapes)} can be planned"
        )
    given: dict[str, Any] = {
        key: torch.zeros(*shapes[key], dtype=dtype) for key in shapes if key in accepted
    }
    if "timestep" in given:
        given["timestep"] = given["timestep"].float()  # of which bfloat16 has too few
    if config.get("addition_embed_type") == "text_time":
        width = config["projection_class_embeddings_input_dim"]
        times = _TIME_IDS * config["addition_time_embed_dim"]
        given["added_cond_kwargs"] = {
            "text_embeds": torch.zeros(sizes.batch, width - times, dtype=dtype),
            "time_ids": torch.zeros(sizes.batch, _TIME_IDS, dtype=dtype),
        }
    return given
