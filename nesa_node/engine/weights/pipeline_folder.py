"""Folders of diffusers' pipelines: several networks, each in a folder of its own.

`model_index.json` names the pipeline's class, and of each of its components a library and a class.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nesa_node.core.errors import CorruptCheckpointError, ModelNotFoundError, UnsupportedModelError
from nesa_node.engine.weights.files import read_json

PIPELINE_INDEX = "model_index.json"
DENOISERS = ("unet", "transformer")
DECODER = "vae"
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
LIBRARIES = ("transformers", "diffusers")


@dataclass(frozen=True, slots=True)
class PipelineIndex:
    """What a pipeline is made of."""

    class_name: str
    components: Mapping[str, tuple[str, str] | None]
    """Library and class of each; None of those that are left out: code of other libraries, and of
    the checkpoint, is never run."""
    options: Mapping[str, bool | int | float | str]
    """Further arguments of its class."""

    @property
    def denoiser(self) -> str:
        """Name of the network that runs once for each step."""
        return next(name for name in DENOISERS if self.components.get(name))

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of its networks that make a picture of a text, in the order in which they run."""
        encoders = (name for name in TEXT_ENCODERS if self.components.get(name))
        return (*encoders, self.denoiser, DECODER)


def is_pipeline(folder: Path) -> bool:
    """Whether a folder is one of several networks."""
    return (folder / PIPELINE_INDEX).is_file() and not (folder / "config.json").exists()


def read_pipeline_index(
    folder: Path, *, name: str, present: Collection[str] | None = None
) -> PipelineIndex:
    """Read `model_index.json`. `present` are paths of files that could be downloaded.

    Raises `CorruptCheckpointError`, and `UnsupportedModelError` for a pipeline that does not make
    pictures of texts, or that needs code from elsewhere.
    """
    path = folder / PIPELINE_INDEX
    raw = read_json(path)
    if not isinstance(raw, dict) or not isinstance(raw.get("_class_name"), str):
        raise CorruptCheckpointError(f"{path} names no _class_name")
    components = {
        key: _read_component(value)
        for key, value in raw.items()
        if key.isidentifier() and not key.startswith("_") and isinstance(value, list)
    }
    options = {
        key: value
        for key, value in raw.items()
        if not key.startswith("_") and isinstance(value, bool | int | float | str)
    }
    found = PipelineIndex(raw["_class_name"], components, options)
    denoisers = [each for each in DENOISERS if components.get(each)]
    if len(denoisers) != 1 or not components.get(DECODER) or len(found.parts) < 3:
        raise UnsupportedModelError(
            f"{name} is a {found.class_name} of {', '.join(components)}: pipelines can be served "
            f"that have a text_encoder, {' or '.join(DENOISERS)}, and {DECODER}"
        )
    for part in found.parts:
        config = f"{part}/config.json"
        if not (folder / config).is_file() if present is None else config not in present:
            raise ModelNotFoundError(f"{name} lacks {config}, which {path.name} names")
    return found


def _read_component(value: list[Any]) -> tuple[str, str] | None:
    match value:
        case [str(library), str(kind)] if library in LIBRARIES and kind.isidentifier():
            return library, kind
    return None
