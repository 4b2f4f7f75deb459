"""Pictures of texts by diffusers' pipelines, whose networks are in pieces over nodes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from nesa_node import SwarmPipeline
from nesa_node.core.errors import (
    ConfigError,
    CorruptCheckpointError,
    UnsupportedFeatureError,
    UnsupportedModelError,
)
from nesa_node.core.ids import Span, split_evenly
from tests.engine.tiny_pipelines import TITLES, save_pipeline
from tests.swarms import in_process_swarm

PROMPT = "a cat (on a mat)"
PIECES = 6


def options(seed: int, **more: Any) -> dict[str, Any]:
    return {
        "num_inference_steps": 3,
        "generator": torch.Generator().manual_seed(seed),
        "output_type": "np",
        **more,
    }


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers'
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "title", [TITLES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in TITLES[1:])]
)
def test_pictures_are_those_of_diffusers(title: str, tmp_path: Path, visited: list[Span]) -> None:
    folder = tmp_path / "model"
    alone = save_pipeline(title, folder)
    with (
        in_process_swarm(folder, split_evenly(PIECES, 2), tmp_path, pieces=PIECES) as addresses,
        SwarmPipeline("text-to-image", folder, initial_peers=addresses) as remote,
    ):
        for more in ({}, {"height": 48, "width": 96}, {"num_images_per_prompt": 2}):
            expected = alone(PROMPT, **options(1, **more)).images
            found = remote(PROMPT, **options(1, **more)).images
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() < 1e-4
            assert found.std() > 0.02
        assert np.abs(found - remote("other", **options(1, **more)).images).max() > 0.01
        visited.clear()
        remote(PROMPT, **options(2))
        encoded = [each.start for each in visited].count(0)
        assert 1 <= encoded <= 2, "texts are encoded once, and not for each step"
        assert visited[-1].end == PIECES
        for wrong, reason in (
            ({"num_inference_steps": 0}, "num_inference_steps 0: a whole number from 1 to"),
            ({"num_images_per_prompt": 10**6}, "a whole number from 1 to 16"),
            ({"clip_skip": 1}, "clip_skip"),
            ({"colour": "red"}, "takes no colour"),
        ):
            with pytest.raises(ConfigError, match=reason):
                remote(PROMPT, **wrong)
        network = remote._network.connection.network
        mixed = msgspec.structs.replace(
            remote._network.connection.plan, pieces=(tuple(range(len(network.captured.graph))),)
        )
        with pytest.raises(UnsupportedFeatureError, match="a piece of two networks"):
            network.check_plan(mixed)
        if title == TITLES[0]:
            _paint_by_command(folder, addresses, alone, tmp_path)
            with pytest.raises(UnsupportedModelError, match="does not use for fill-mask"):
                SwarmPipeline("fill-mask", folder, initial_peers=addresses)


def _paint_by_command(folder: Path, addresses: Any, alone: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nesa_node", "task", "text-to-image", PROMPT, "--json"]
    command += ["--model", str(folder), "--initial-peers", *addresses, "--seed", "5"]
    done = subprocess.run(
        [*command, "--steps", "2"], capture_output=True, check=True, cwd=tmp_path, timeout=120
    )
    (answer,) = json.loads(done.stdout)
    assert answer == {"input": PROMPT, "answer": [{"picture": "a-cat-on-a-mat.1.png"}]}
    given = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(5)}
    (expected,) = alone(PROMPT, **given).images
    with Image.open(tmp_path / "a-cat-on-a-mat.1.png") as found:
        difference = np.asarray(found).astype(int) - np.asarray(expected).astype(int)
    assert np.abs(difference).max() <= 1


def test_other_pipelines_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_pipeline(TITLES[0], folder)
    index = folder / "model_index.json"
    raw = json.loads(index.read_text())

    def refused(error: type[Exception], reason: str, **changed: Any) -> None:
        index.write_text(json.dumps({**raw, **changed}))
        with pytest.raises(error, match=reason):
            SwarmPipeline("text-to-image", folder, initial_peers=[])

    refused(UnsupportedModelError, "pipelines can be served that have", unet=["evil", "Unet"])
    refused(UnsupportedModelError, "pipelines can be served that have", unet=[None, None])
    refused(CorruptCheckpointError, "names no _class_name", _class_name=1)
    shutil.rmtree(folder / "vae")
    refused(Exception, "lacks vae/config.json")
