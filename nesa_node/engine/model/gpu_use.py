"""The share of an NVIDIA GPU's time that other programs use, read through NVML.

NVML is a library of the driver; `nvmlDeviceGetProcessUtilization` stands in NVIDIA's NVML API
reference.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import psutil
import torch

from nesa_node.core.errors import ConfigError

_SAMPLED_S = 5.0
_MAX_PROCESSES = 256
_SUCCESS, _NOT_FOUND = 0, 6


class UtilizationSample(ctypes.Structure):
    """NVML's nvmlProcessUtilizationSample_t: percent of the time since the last sample."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("timestamp_us", ctypes.c_ulonglong),
        ("compute_percent", ctypes.c_uint),
        ("memory_percent", ctypes.c_uint),
        ("encoder_percent", ctypes.c_uint),
        ("decoder_percent", ctypes.c_uint),
    )


def watch_other_programs(device: torch.device) -> Callable[[], float]:
    """Return a function that reads the share, from 0 to 1, that other programs use of `device`.

    This process and its children do not count. In a container, whose process ids the driver does
    not know, they do. It raises `OSError` where the driver does not tell. Raises `ConfigError` for
    a device that is no NVIDIA GPU.
    """
    if device.type != "cuda":
        raise ConfigError(f"--pool-gpu-share is for an NVIDIA GPU; the device is {device.type}")

    def read() -> float:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        own = psutil.Process()
        pids = {own.pid, *(child.pid for child in own.children(recursive=True))}
        return read_share_of_others(_load_nvml(), uuid, pids)

    return read


@cache
def _load_nvml() -> Any:
    """Raises `OSError` where the driver is not installed, or does not start."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    _check(library.nvmlInit_v2(), "nvmlInit")
    return library


def read_share_of_others(nvml: Any, uuid: str, own_pids: Collection[int]) -> float:
    """The share of the GPU's time that processes beside `own_pids` used in the last seconds.

    `nvml` is the loaded library. Raises `OSError` for its errors.
    """
    handle = ctypes.c_void_p()
    found = nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
    _check(found, "nvmlDeviceGetHandleByUUID")
    samples, count = (UtilizationSample * _MAX_PROCESSES)(), ctypes.c_uint(_MAX_PROCESSES)
    since_us = ctypes.c_ulonglong(int((time.time() - _SAMPLED_S) * 1e6))
    code = nvml.nvmlDeviceGetProcessUtilization(handle, samples, ctypes.byref(count), since_us)
    if code == _NOT_FOUND:  # no process used the GPU
        return 0.0
    _check(code, "nvmlDeviceGetProcessUtilization")
    used = sum(each.compute_percent for each in samples[: count.value] if each.pid not in own_pids)
    return float(min(used / 100, 1.0))


def _check(code: int, function: str) -> None:
    if code != _SUCCESS:
        raise OSError(f"the NVIDIA driver does not tell what other programs use: {function} {code}")
