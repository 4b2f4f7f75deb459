"""Reads speech from files, as networks take it: one channel, at their sampling rate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.errors import ConfigError, is_installed

MAX_VALUES = 1 << 28
"""Of a file, 1 GiB: a few kilobytes of FLAC may stand for days of silence."""
FORMATS = "WAV, FLAC, OGG or MP3"


def read_audio(source: str | Path | bytes, rate: int) -> NDArray[np.float32]:
    """The samples of a file, or of its content, at `rate` per second; all channels' mean.

    Raises `ConfigError` for what is no audio, holds none or too much of it, and without soundfile.
    """
    if not is_installed("soundfile"):
        raise ConfigError("reading audio needs soundfile: pip install 'nesa-node[audio]'")
    import io

    import soundfile

    name = "the audio" if isinstance(source, bytes) else str(source)
    try:
        with soundfile.SoundFile(
            io.BytesIO(source) if isinstance(source, bytes) else str(source)
        ) as file:
            if file.frames * file.channels > MAX_VALUES:
                raise ConfigError(
                    f"{name} has {file.frames / file.samplerate / 60:.0f} minutes of audio in "
                    f"{file.channels} channels: cut it into parts"
                )
            values_TC = file.read(dtype="float32", always_2d=True)
            found_rate = file.samplerate
    except (soundfile.SoundFileError, OSError, RuntimeError) as error:
        raise ConfigError(f"{name} cannot be read as {FORMATS}: {error}") from error
    return resample(values_TC.mean(axis=1), found_rate, rate, name)


def resample(values_T: Any, found_rate: int, rate: int, name: str) -> NDArray[np.float32]:
    """Samples of `found_rate` per second at `rate`. Raises `ConfigError` where there are none."""
    from scipy.signal import resample_poly

    if not len(values_T) or found_rate < 1:
        raise ConfigError(f"{name} holds no samples")
    if found_rate == rate:
        return np.asarray(values_T, np.float32)
    shared = math.gcd(found_rate, rate)
    made: NDArray[np.float32] = resample_poly(
        np.asarray(values_T, np.float32), rate // shared, found_rate // shared
    ).astype(np.float32)
    return made
