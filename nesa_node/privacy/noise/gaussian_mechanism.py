"""The analytic Gaussian mechanism (Balle and Wang 2018), for the vectors of a session.

A vector of norm at most `clip` may be any other such vector: its sensitivity is 2 clip. Adding
normal noise of standard deviation sigma is (eps, delta)-differentially private exactly where

    Phi(s / 2 sigma - eps sigma / s) - e^eps Phi(-s / 2 sigma - eps sigma / s) <= delta

(theorem 8), s the sensitivity. n vectors with noise of their own are one with sensitivity s sqrt(n)
(Dong, Roth and Su 2019, corollary 3.3), so that composition is exact, too. Since each token changes
all later vectors, what holds for a text is the composition over all tokens that were sent.

T tokens, D hidden.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from math import exp, inf, prod, sqrt

import numpy as np
import torch
from scipy.special import log_ndtr, ndtr, ndtri
from torch import Tensor

_STEPS = 200
"""Of bisections: the error is below that of float64."""


def find_delta(epsilon: float, signal: float) -> float:
    """The least delta at `epsilon` of noise; `signal` is the sensitivity over sigma."""
    if signal == 0:
        return 0.0
    first = float(ndtr(signal / 2 - epsilon / signal))
    return max(first - exp(epsilon + float(log_ndtr(-signal / 2 - epsilon / signal))), 0.0)


def find_sigma(epsilon: float, delta: float, sensitivity: float) -> float:
    """The least standard deviation that is (epsilon, delta)-differentially private."""
    low, high = 0.0, 1.0
    while find_delta(epsilon, high) < delta:
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if find_delta(epsilon, middle) <= delta else (low, middle)
    return sensitivity / low if low else inf


def find_epsilon(delta: float, signal: float) -> float:
    """The least epsilon at `delta` of noise; `signal` is the sensitivity over sigma."""
    if find_delta(0.0, signal) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while find_delta(high, signal) > delta:
        high *= 2
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if find_delta(middle, signal) <= delta else (middle, high)
    return high


def compose_epsilon(epsilon: float, delta: float, vectors: int) -> float:
    """Epsilon at `delta` of `vectors` vectors, each (epsilon, delta) by itself."""
    return find_epsilon(delta, sqrt(vectors) / find_sigma(epsilon, delta, 1.0))


def clip_norms(states_TD: Tensor, clip: float) -> Tensor:
    """States whose norms are at most `clip`, in float32; those that are longer are scaled."""
    states_TD = states_TD.float()
    norms_T1 = states_TD.norm(dim=1, keepdim=True).clamp_min(1e-30)
    clipped_TD: Tensor = states_TD * (clip / norms_T1).clamp_max(1)
    return clipped_TD


def add_noise(states_TD: Tensor, clip: float, sigma: float) -> Tensor:
    """Clipped states with secret normal noise, in the dtype and on the device of `states_TD`.

    Floating point makes the guarantee approximate (Mironov 2012).
    """
    noise_TD = random_normal(states_TD.shape)
    noisy_TD: Tensor = clip_norms(states_TD, clip) + sigma * noise_TD.to(states_TD.device)
    return noisy_TD.to(states_TD.dtype)


def random_normal(shape: Sequence[int]) -> Tensor:
    """Normal numbers of the system's generator, in float32: none that can be computed again."""
    drawn = np.frombuffer(secrets.token_bytes(8 * prod(shape)), np.uint64) >> np.uint64(11)
    # The middles of 2^53 equal parts of (0, 1).
    uniform = (drawn.astype(np.float64) + 0.5) * 2.0**-53
    noise: Tensor = torch.from_numpy(np.asarray(ndtri(uniform), np.float32).reshape(tuple(shape)))
    return noise
