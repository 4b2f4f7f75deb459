"""Choice of the torch device that a name stands for."""

from __future__ import annotations

import torch

from nesa_node.core.errors import ConfigError

_KINDS = ("cpu", "cuda", "mps")


def choose_device(name: str | torch.device) -> torch.device:
    """Return the device named; `auto` is the first GPU, or the CPU.

    Raises `ConfigError` for a device that this machine, or this build of torch, does not have.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in _KINDS:
            raise RuntimeError(f"{device.type} is not supported here")
    except RuntimeError as error:
        raise ConfigError(
            f"device {name}: there is no such device here; give auto, cpu, cuda, cuda:N or mps"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name}: {torch.cuda.device_count()} CUDA devices are here; use cpu"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device mps: this machine or this build of torch has none; use cpu")
    return device
