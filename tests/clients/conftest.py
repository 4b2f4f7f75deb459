"""One swarm and one gateway for all clients, and the same model in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from nesa_node.core.settings.declaration import default_cache_dir
from nesa_node.engine.weights.demo_model import demo_model_path
from tests.clients.live_gateway import LiveGateway, live_gateway
from tests.clients.local_answers import LocalAnswers


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return demo_model_path(default_cache_dir())


@pytest.fixture(scope="package")
def gateway(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    with live_gateway(demo_folder, tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest.fixture(scope="package")
def local(demo_folder: Path) -> LocalAnswers:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32)
    return LocalAnswers(model.eval(), AutoTokenizer.from_pretrained(demo_folder))  # type: ignore[no-untyped-call]
