"""OpenAI's client at a gateway that offers networks in pieces: pictures, speech, embeddings."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
import torch
import transformers
from PIL import Image

from nesa_node.core.ids import Span
from tests.e2e import test_tasks as tasks
from tests.e2e.gateway import gateway_process
from tests.e2e.test_speech import RATE, TASK, save_wav2vec2, speech
from tests.engine.tiny_pipelines import save_pipeline
from tests.swarms import in_process_swarm

HF: Any = transformers
ENCODER = tasks.Case("feature-extraction", "BertModel", lambda: HF.BertConfig(**tasks.BERT))
PIECES = 3
pytestmark = pytest.mark.timeout(300)  # the first one waits for three swarms
NAMES = ("painter", "listener", "encoder")


class Scene:
    def __init__(self, folder: Path, url: str, painting: Any) -> None:
        self.folder, self.url, self.painting = folder, url, painting
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("networks")
    painting = save_pipeline("StableDiffusionPipeline", folder / "painter")
    save_wav2vec2(folder / "listener")
    tasks.save(ENCODER, folder / "encoder")
    with ExitStack() as stack:
        addresses: tuple[str, ...] = ()
        for name in NAMES:
            own = folder / f"node-{name}"
            own.mkdir()
            joined = {"initial_peers": addresses} if addresses else {}
            served = stack.enter_context(
                in_process_swarm(folder / name, [Span(0, PIECES)], own, pieces=PIECES, **joined)
            )
            addresses = addresses or served
        flags = [part for name in NAMES for part in ("--networks", str(folder / name))]
        gateway = stack.enter_context(gateway_process(None, folder, addresses, *flags))
        scene = Scene(folder, gateway.url, painting)
        # Each joins the swarm with its first request.
        scene.client.images.generate(model="painter", prompt="a", extra_body={"steps": 1})
        scene.client.embeddings.create(model="encoder", input="a")
        scene.client.audio.transcriptions.create(model="listener", file=recording())
        yield scene


def recording() -> io.BytesIO:
    file = io.BytesIO()
    soundfile.write(file, speech(1.0, RATE).mean(1), RATE, format="WAV")
    file.seek(0)
    file.name = "speech.wav"
    return file


def read_picture(text: str) -> np.ndarray[Any, Any]:
    with Image.open(io.BytesIO(base64.b64decode(text))) as picture:
        return np.asarray(picture).astype(int)


def test_pictures_are_those_of_diffusers(scene: Scene) -> None:
    assert {*NAMES} <= {each.id for each in scene.client.models.list()}
    more = {"seed": 4, "steps": 3}
    made = scene.client.images.generate(
        model="painter", prompt="a cat", n=2, size="64x48", extra_body=more
    )
    expected = scene.painting(
        "a cat",
        num_images_per_prompt=2,
        num_inference_steps=3,
        width=64,
        height=48,
        generator=torch.Generator().manual_seed(4),
    ).images
    assert made.data is not None
    assert len(made.data) == 2
    for one, other in zip(made.data, expected, strict=True):
        assert one.b64_json is not None
        assert np.abs(read_picture(one.b64_json) - np.asarray(other).astype(int)).max() <= 1
    linked = scene.client.images.generate(
        model=str(scene.folder / "painter"),
        prompt="a cat",
        size="64x48",
        response_format="url",
        extra_body=more,
    )
    assert linked.data is not None
    url = linked.data[0].url or ""
    assert url.startswith("data:image/png;base64,")
    assert read_picture(url.partition(",")[2]).shape == (48, 64, 3)


def test_a_client_that_leaves_ends_its_picture(scene: Scene) -> None:
    """Its 200 steps would take longer than all that is asked for afterwards."""
    body = {"model": "painter", "prompt": "a cat", "steps": 200, "size": "256x256", "n": 4}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{scene.url}/v1/images/generations", json=body, timeout=2)
    next_one = threading.Event()

    def paint() -> None:
        scene.client.images.generate(model="painter", prompt="b", extra_body={"steps": 1})
        next_one.set()

    threading.Thread(target=paint, daemon=True).start()
    assert next_one.wait(30), "a pipeline paints one picture at a time"


def test_words_are_those_of_transformers(scene: Scene) -> None:
    samples = soundfile.read(recording(), dtype="float32")[0]
    expected = HF.pipeline(TASK, model=str(scene.folder / "listener"))(samples)["text"]
    create = scene.client.audio.transcriptions.create
    assert create(model="listener", file=recording()).text == expected != ""
    assert create(model="listener", file=recording(), response_format="text") == expected


def test_embeddings_are_means_of_hidden_states(scene: Scene) -> None:
    texts = ["nodes hold blocks", "a model of"]
    found = scene.client.embeddings.create(model="encoder", input=texts)
    model = HF.BertModel.from_pretrained(scene.folder / "encoder").eval()
    tokenizer = HF.AutoTokenizer.from_pretrained(scene.folder / "encoder")
    tokens = 0
    for text, one in zip(texts, found.data, strict=True):
        given = tokenizer(text, return_tensors="pt")
        tokens += given.input_ids.numel()
        with torch.no_grad():
            state_D = model(**given).last_hidden_state[0].mean(0)
        expected_D = state_D / state_D.norm()
        assert torch.allclose(torch.tensor(one.embedding), expected_D, atol=1e-5)
    assert found.usage.prompt_tokens == tokens


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("images/generations", {"prompt": "a"}, 400, "model is required"),
        ("images/generations", {"model": "nothing", "prompt": "a"}, 404, "painter, listener"),
        ("images/generations", {"model": "listener", "prompt": "a"}, 400, "made by pipelines"),
        ("images/generations", {"model": "painter", "prompt": ""}, 400, "prompt"),
        (
            "images/generations",
            {"model": "painter", "prompt": "a", "size": "99999x99999"},
            400,
            "more than 4 megapixels",
        ),
        (
            "images/generations",
            {"model": "painter", "prompt": "a", "size": "63x64"},
            400,
            "divisible by",
        ),
        ("images/generations", {"model": "painter", "prompt": "a", "n": 11}, 400, "n: it should"),
        ("embeddings", {"model": "encoder", "input": "a " * 600}, 400, "takes at most 512"),
        ("embeddings", {"model": "encoder", "input": [1, 2]}, 400, "not tokens"),
        ("embeddings", {"model": "encoder", "input": ["a"] * 129}, 400, "at most 128"),
        ("audio/transcriptions", {"model": "listener"}, 415, "must be multipart/form-data"),
    ],
)
def test_bad_requests_say_what_is_wrong(
    scene: Scene, path: str, body: dict[str, Any], status: int, reason: str
) -> None:
    answer = httpx.post(f"{scene.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    assert reason in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("files", "data", "reason"),
    [
        ({"file": ("a.wav", b"no audio")}, {"model": "listener"}, "cannot be read"),
        ({}, {"model": "listener"}, "file is required"),
        ({"file": ("a.wav", b"")}, {"model": "listener", "prompt": "x"}, "prompt"),
        ({"file": ("a.wav", b"")}, {"model": "listener", "language": "../"}, "language"),
    ],
)
def test_bad_files_say_what_is_wrong(
    scene: Scene, files: dict[str, Any], data: dict[str, str], reason: str
) -> None:
    url = f"{scene.url}/v1/audio/transcriptions"
    sent = files or {"other": ("a.wav", b"")}
    answer = httpx.post(url, files=sent, data=data, timeout=60)
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]["message"]
