"""transformers' pipelines, with a model whose forward pass runs in a swarm."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModelForImageSegmentation,
    AutoModelForInstanceSegmentation,
    AutoModelForQuestionAnswering,
    AutoModelForSemanticSegmentation,
    AutoModelForSeq2SeqLM,
    AutoModelForUniversalSegmentation,
    PreTrainedModel,
)
from transformers.pipelines import SUPPORTED_TASKS

from nesa_node.client.graphs.audio import read_audio, resample
from nesa_node.client.graphs.remote_generation import make_generator
from nesa_node.client.graphs.remote_network import RemoteNetwork
from nesa_node.client.graphs.task_pipelines import (
    ImageToTextPipeline,
    QuestionAnsweringPipeline,
    TextToTextPipeline,
)
from nesa_node.core.errors import (
    ConfigError,
    CorruptCheckpointError,
    UnsupportedModelError,
    is_installed,
)
from nesa_node.core.settings.choices import RouteName
from nesa_node.engine.weights.files import check_side_files
from nesa_node.engine.weights.tokenizer import load_tokenizer

TASKS = (
    "automatic-speech-recognition",
    "depth-estimation",
    "feature-extraction",
    "fill-mask",
    "image-classification",
    "image-feature-extraction",
    "image-segmentation",
    "image-to-text",
    "object-detection",
    "question-answering",
    "summarization",
    "text-classification",
    "text-to-image",
    "token-classification",
    "translation",
    "zero-shot-classification",
    "zero-shot-image-classification",
)
OWN_PIPELINES: dict[str, Any] = {
    "image-to-text": ImageToTextPipeline,
    "question-answering": QuestionAnsweringPipeline,
    "summarization": TextToTextPipeline,
    "translation": TextToTextPipeline,
}
"""Of tasks that transformers 5 has none for."""
PICTURES = "text-to-image"
SPEECH = "automatic-speech-recognition"
MAX_PIXELS = 1 << 26
"""Of a picture, 64 megapixels: a few kilobytes of PNG may stand for gigabytes."""


class SwarmPipeline:
    """A pipeline of transformers; calling it takes and returns what that pipeline does.

        with SwarmPipeline("image-classification", "google/vit-base-patch16-224",
                           initial_peers=["192.0.2.7:31330"]) as classify:
            print(classify("picture.png"))

    Texts and pictures are prepared here, and answers made here; nodes see tensors alone.
    """

    def __init__(
        self,
        task: str,
        model: str | Path,
        *,
        initial_peers: str | Sequence[str] = (),
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | Path | None = None,
        swarm_key: str | None = None,
        identity_path: str | Path | None = None,
        routing: RouteName = "chain",
        recovery_timeout_s: float = 60.0,
        **options: Any,
    ) -> None:
        """Join the swarm that serves `model` (a folder or hub name) in pieces.

        A translation may name its languages, as transformers' tasks do: translation_en_to_fr.
        `options` are transformers' own of this pipeline. Nodes send values to each other, or in
        a "star" to this client, so that no node sees another. Requests wait `recovery_timeout_s`
        for nodes. Raises `ConfigError` for a task or model that does not fit, and what
        `RemoteNetwork` raises.
        """
        require_task(task)
        self._network = RemoteNetwork.from_pretrained(
            model,
            initial_peers=initial_peers,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            swarm_key=swarm_key,
            identity_path=identity_path,
            routing=routing,
            recovery_timeout_s=recovery_timeout_s,
        )
        self._task = plain_task(task)
        try:
            self._pipeline = self._make_pipeline(task, options)
        except BaseException:
            self.close()
            raise

    def _make_pipeline(self, full_task: str, options: dict[str, Any]) -> Any:
        task = self._task
        if task == PICTURES:
            if options:
                raise ConfigError(f"text-to-image takes no {', '.join(options)} here")
            from nesa_node.client.graphs.remote_diffusion import RemoteDiffusion

            return RemoteDiffusion(self._network)
        name = self._network.checkpoint.name
        model = self._network.connection.network.model
        if type(model).__name__ not in _model_names(task):
            raise UnsupportedModelError(
                f"{name} is a {type(model).__name__}, which transformers does not use for {task}"
            )
        assert isinstance(model, PreTrainedModel)
        parts = self._load_parts(task)
        stand_in: Any = model
        if _pipeline_class(task)._pipeline_calls_generate and model.can_generate():
            stand_in = make_generator(self._network)
        else:
            stand_in.forward = self._forward
        return _pipeline_class(task)(
            model=stand_in, task=full_task, device=model.device, **parts, **options
        )

    def _forward(self, **inputs: Any) -> Any:
        return self._network(**inputs)

    def _load_parts(self, task: str) -> dict[str, Any]:
        """Tokenizer and processors, as the pipeline's class says. Code of a model is never run."""
        impl = _pipeline_class(task)
        folder = self._network.checkpoint.fetch_side_files()
        check_side_files(folder)
        parts: dict[str, Any] = {}
        if impl._load_tokenizer or (folder / "tokenizer_config.json").is_file():
            parts["tokenizer"] = load_tokenizer(folder)
        for key, loader, needed in (
            ("image_processor", AutoImageProcessor, impl._load_image_processor),
            ("feature_extractor", AutoFeatureExtractor, impl._load_feature_extractor),
        ):
            if needed:
                parts[key] = _load_processor(loader, folder)
        return parts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline. Raises `ConfigError` for pictures and audio that cannot be read."""
        if self._task == PICTURES:
            return self._pipeline(*args, **kwargs)
        if self._task == SPEECH and args:
            extractor = self._pipeline.feature_extractor
            args = _read_speech(args[0], extractor.sampling_rate), *args[1:]
            longest = getattr(extractor, "n_samples", None)
            if longest is not None and _has_longer(args[0], longest):
                # Whisper takes half a minute at once.
                kwargs.setdefault("chunk_length_s", extractor.chunk_length)
        else:
            for given in (*args, *kwargs.values()):
                check_picture(given)
        return self._pipeline(*args, **kwargs)

    def __enter__(self) -> SwarmPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the swarm. Idempotent."""
        self._network.close()


def require_task(task: str) -> None:
    """Raise `ConfigError` for a task that is none of `TASKS`, and of pictures without Pillow."""
    if plain_task(task) not in TASKS:
        raise ConfigError(f"unknown task {task!r}: give {', '.join(TASKS)}")
    if plain_task(task) == PICTURES:
        needed = "diffusers" if is_installed("PIL") else "PIL"
    elif _pipeline_class(plain_task(task))._load_image_processor:
        needed = "PIL"
    else:
        return
    if not is_installed(needed):
        library = {"PIL": "Pillow"}.get(needed, needed)
        raise ConfigError(f"{task} needs {library}: pip install 'nesa-node[images]'")


def plain_task(task: str) -> str:
    """The task without languages: of translation_en_to_fr translation."""
    return "translation" if re.fullmatch("translation_[a-z]+_to_[a-z]+", task) else task


def _pipeline_class(task: str) -> Any:
    if task in OWN_PIPELINES:
        return OWN_PIPELINES[task]
    return getattr(transformers, "".join(map(str.capitalize, task.split("-"))) + "Pipeline")


def _model_names(task: str) -> set[str]:
    """The classes that transformers uses for a task."""
    autos: Any
    match task:
        case "image-to-text":
            return {"VisionEncoderDecoderModel"}
        case "image-segmentation":
            autos = (
                AutoModelForImageSegmentation,
                AutoModelForInstanceSegmentation,
                AutoModelForSemanticSegmentation,
                AutoModelForUniversalSegmentation,
            )
        case "question-answering":
            autos = (AutoModelForQuestionAnswering,)
        case "summarization" | "translation":
            autos = (AutoModelForSeq2SeqLM,)
        case _:
            row: Any = SUPPORTED_TASKS[task]
            autos = row["pt"]
    entries = [each for auto in autos for each in auto._model_mapping._model_mapping.values()]
    return {name for entry in entries for name in ([entry] if isinstance(entry, str) else entry)}


def _load_processor(loader: Any, folder: Path) -> Any:
    try:
        return loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # transformers raises exceptions of many types for files that are missing or wrong.
        raise CorruptCheckpointError(
            f"{folder}: no processor can be made of it ({error})"
        ) from error


def check_picture(given: Any) -> None:
    """Raise `ConfigError` for a picture with more than `MAX_PIXELS`, before it is decoded.

    `given` may be a path, a picture, or a sequence of these; all else is left to the pipeline.
    """
    if not is_installed("PIL"):
        return
    from PIL import Image, UnidentifiedImageError

    if isinstance(given, list | tuple):
        for each in given:
            check_picture(each)
    elif isinstance(given, Image.Image):
        _check_size(given.size, "the picture")
    elif isinstance(given, str | Path) and os.path.isfile(given):  # of a long text, pathlib raises
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                with Image.open(given) as image:
                    _check_size(image.size, str(given))
        except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
            raise ConfigError(f"{given} cannot be read as a picture: {error}") from error


def _read_speech(given: Any, rate: int) -> Any:
    """What the pipeline takes, at the network's rate, which it cannot always change itself."""
    match given:
        case list() | tuple():
            return [_read_speech(each, rate) for each in given]
        case str() | Path() | bytes():
            return {"raw": read_audio(given, rate), "sampling_rate": rate}
        case {"sampling_rate": int(found), "raw": samples} | {
            "sampling_rate": int(found),
            "array": samples,
        }:
            return {"raw": resample(samples, found, rate, "the audio"), "sampling_rate": rate}
    return given


def _has_longer(given: Any, samples: int) -> bool:
    """Whether any of the audio that `_read_speech` gave has more samples."""
    if isinstance(given, list):
        return any(_has_longer(each, samples) for each in given)
    return isinstance(given, dict) and len(given.get("raw", ())) > samples


def _check_size(size: tuple[int, int], name: str) -> None:
    if size[0] * size[1] > MAX_PIXELS:
        raise ConfigError(
            f"{name} has {size[0]} x {size[1]} pixels; at most {MAX_PIXELS >> 20} megapixels are "
            "taken: scale it down"
        )
