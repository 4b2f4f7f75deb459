"""A device that is not there is told as such before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from nesa_node.core.errors import ConfigError
from nesa_node.engine.model.devices import choose_device


def test_a_device_that_is_there_is_itself() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device(torch.device("cpu")) == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cuda:63", "CUDA devices are here; use cpu"),
        ("gpu", "no such device here; give auto, cpu"),
        ("meta", "no such device here; give auto, cpu"),
        ("cuda:x", "no such device here"),
    ],
)
def test_one_that_is_not_there_is_named(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"device {name}: .*{reason}"):
        choose_device(name)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="it is there")
def test_apple_s_gpu_elsewhere_is_named() -> None:
    with pytest.raises(ConfigError, match=r"device mps: this machine .* has none"):
        choose_device("mps")
