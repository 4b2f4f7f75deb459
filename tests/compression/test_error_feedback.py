"""Gradients of many steps in lossy codecs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nesa_node.compression import tensors
from nesa_node.compression.codecs import codec_names, expand_codec, gradient_codec
from nesa_node.compression.error_feedback import FeedbackEncoder

CODECS = ["blockwise8", "int8", "int4", "bfloat16"]


def make_gradients(count: int) -> list[Tensor]:
    """With the same direction, and numbers that no codec has exactly."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(16, 24, generator=generator)
    return [mean + 0.1 * torch.randn(16, 24, generator=generator) for _ in range(count)]


def encode(encoder: FeedbackEncoder, value: Tensor) -> bytes:
    return bytes(encoder.encode({"a": value})["a"][1])


def send(encoder: FeedbackEncoder, value: Tensor) -> Tensor:
    meta, payload = encoder.encode({"a": value})["a"]
    return tensors.decode(meta, bytes(payload), max_bytes=1 << 20).reshape(value.shape)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_lost_comes_later(codec: str) -> None:
    pytest.importorskip("bitsandbytes")
    encoder, grads = FeedbackEncoder(expand_codec(codec)), make_gradients(64)
    total, largest = torch.zeros(16, 24), 0.0
    for grad in grads:
        total += send(encoder, grad)
        encoder.commit()
        largest = max(largest, float(torch.stack(grads).abs().max()))
    late = float((total - sum(grads, torch.zeros(16, 24))).abs().max())
    plain = FeedbackEncoder(expand_codec(codec))
    once = float((send(plain, grads[0]) - grads[0]).abs().max())
    assert once > 0
    assert late < 4 * once < 0.5 * largest


def test_a_step_that_runs_again_sends_the_same_bytes() -> None:
    first, second, third = make_gradients(3)
    encoder = FeedbackEncoder(expand_codec("int8"))
    send(encoder, first)
    encoder.commit()
    # Two micro-batches of one step: the second has what the first one lost.
    once = [encode(encoder, value) for value in (second, third)]
    encoder.discard()
    again = [encode(encoder, value) for value in (second, third)]
    assert once == again
    encoder.reset()
    fresh = FeedbackEncoder(expand_codec("int8"))
    assert encode(encoder, first) == encode(fresh, first)


def test_a_call_that_outlives_its_step_changes_nothing() -> None:
    """A thread that goes on after its step has begun again."""
    first, second = make_gradients(2)
    encoder, fresh = (FeedbackEncoder(expand_codec("int8")) for _ in range(2))

    class Late(dict[str, Tensor]):
        def items(self) -> Any:
            for name, value in super().items():
                encoder.discard()
                yield name, value

    encoder.encode(Late(a=first))
    assert encode(encoder, second) == encode(fresh, second)


def test_uncompressed_gradients_are_as_they_are() -> None:
    [grad] = make_gradients(1)
    meta, payload = FeedbackEncoder("none").encode({"a": grad})["a"]
    assert meta.shape == (16, 24)
    assert torch.equal(tensors.decode(meta, bytes(payload), max_bytes=1 << 20), grad)


def test_floors_and_peers_that_do_not_decode_a_codec_get_plain_gradients() -> None:
    pytest.importorskip("bitsandbytes")
    codec = expand_codec("blockwise8")
    assert gradient_codec(codec, codec_names()) == codec
    assert gradient_codec(codec, ()) == "none"
    for floor in ("exact", "high", "balanced"):
        assert gradient_codec(floor, codec_names()) == "none"
