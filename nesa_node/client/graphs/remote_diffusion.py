"""Pictures of texts by a pipeline of diffusers, whose networks run in a swarm.

The loop over denoising steps, tokens, random latents and the scheduler are diffusers' own, here.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor

from nesa_node.client.graphs.remote_network import RemoteNetwork
from nesa_node.core.errors import ConfigError, CorruptCheckpointError, UnsupportedModelError
from nesa_node.core.logging import get_logger
from nesa_node.engine.graphs.text_to_image import PipelineNetworks
from nesa_node.engine.weights.files import check_side_files
from nesa_node.engine.weights.pipeline_folder import (
    DECODER,
    PipelineIndex,
    is_pipeline,
    read_pipeline_index,
)

log = get_logger(__name__)

_LOCAL_CLASSES: tuple[Any, ...] = (
    transformers.PreTrainedTokenizerBase,
    diffusers.SchedulerMixin,
)
"""Of components that run here."""
MAX_STEPS = 1000
MAX_PICTURES = 16
"""Of one call."""


class RemoteDiffusion:
    """A pipeline of diffusers, of which networks that make pictures of texts run in a swarm."""

    def __init__(self, network: RemoteNetwork) -> None:
        """Join the swarm. Raises `UnsupportedModelError`, `CorruptCheckpointError`."""
        self._network = network
        self._turn = threading.Lock()
        """A pipeline's scheduler is for one picture at a time."""
        model = network.connection.network.model
        name = network.checkpoint.name
        folder = network.checkpoint.fetch_side_files()
        if not isinstance(model, PipelineNetworks) or not is_pipeline(folder):
            raise UnsupportedModelError(
                f"{name} is a {type(model).__name__}, and pictures of texts are made by pipelines "
                "of diffusers: give a folder with a model_index.json"
            )
        index = read_pipeline_index(folder, name=name)
        networks = dict(model.named_children())
        for part, each in networks.items():
            self._replace_forward(part, each)
        self._pipeline = _make_pipeline(index, networks, folder)

    def __call__(self, prompt: str | list[str] | None = None, **options: Any) -> Any:
        """Pictures of `prompt`, as the pipeline's class in diffusers takes and returns them.

        Raises `ConfigError` for options that it does not take, or that ask for too much.
        """
        if options.get("clip_skip"):
            raise ConfigError("clip_skip: nodes give the last hidden states of texts alone")
        steps = options.get("num_inference_steps", 1)
        count = options.get("num_images_per_prompt", 1)
        for key, value, most in (
            ("num_inference_steps", steps, MAX_STEPS),
            ("num_images_per_prompt", count, MAX_PICTURES),
        ):
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{key} {value}: a whole number from 1 to {most}")
        accepted = signature(self._pipeline.__call__).parameters
        if unknown := options.keys() - accepted.keys():
            raise ConfigError(
                f"{type(self._pipeline).__name__} takes no {', '.join(sorted(unknown))}"
            )
        with self._turn:
            return self._pipeline(prompt, **options)

    def _replace_forward(self, part: str, network: Any) -> None:
        if part == DECODER:

            def decode(latents: Tensor, return_dict: bool = True, **_: Any) -> Any:
                # One at a time: pictures take many times the memory of their latents.
                made = [self._run(part, {"latents": each})[0] for each in torch.split(latents, 1)]
                return (torch.cat(made),)

            network.decode = decode
            return
        accepted = signature(network.forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(part, accepted.bind(*args, **kwargs).arguments)

        network.forward = forward

    def _run(self, part: str, given: Mapping[str, Any]) -> Any:
        found: dict[str, Tensor] = {}
        for key, value in given.items():
            for name, each in value.items() if isinstance(value, dict) else (("", value),):
                if isinstance(each, Tensor):
                    found[".".join(filter(None, (part, key, name)))] = each
        expected = self._network.connection.network.input_names
        batch = max((len(each) for each in found.values() if each.ndim), default=1)
        for name, each in found.items():
            if not each.ndim:
                found[name] = each.expand(batch)
        mask, ids = f"{part}.attention_mask", found.get(f"{part}.input_ids")
        if mask in expected and mask not in found and ids is not None:
            found[mask] = torch.ones_like(ids)
        return self._network.run_part(part, found)


def _make_pipeline(index: PipelineIndex, networks: Mapping[str, Any], folder: Path) -> Any:
    found: Any = getattr(diffusers, index.class_name, None)
    if not (isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline)):
        raise UnsupportedModelError(f"diffusers has no pipeline {index.class_name}")
    accepted = signature(found).parameters
    wanted = accepted.keys() & index.components.keys()
    components = {key: _load_component(index, key, networks, folder) for key in wanted}
    options = {**index.options, "requires_safety_checker": False}
    given = {key: value for key, value in options.items() if key in accepted} | components
    try:
        made = found(**given)
    except Exception as error:  # diffusers checks components with exceptions of many types
        raise CorruptCheckpointError(
            f"{folder}: no {index.class_name} can be made of it ({error})"
        ) from error
    made.set_progress_bar_config(disable=True)
    return made


def _load_component(
    index: PipelineIndex, key: str, networks: Mapping[str, Any], folder: Path
) -> Any:
    """A component: a stand-in for a network, or what runs here. None for all else.

    Raises `CorruptCheckpointError` for what cannot be loaded.
    """
    if key in networks or index.components[key] is None:
        return networks.get(key)
    library, name = index.components[key] or ("", "")
    kind: Any = getattr({"transformers": transformers, "diffusers": diffusers}[library], name, None)
    if not _runs_here(kind):
        log.info("component_left_out", component=key, type=name)
        return None
    check_side_files(folder / key)
    load = kind.from_pretrained  # of a named class, which runs no code of the checkpoint's
    try:
        return load(folder / key, local_files_only=True)
    except Exception as error:  # of both libraries, of many types
        raise CorruptCheckpointError(f"{folder / key}: no {name} in it ({error})") from error


def _runs_here(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, _LOCAL_CLASSES)
