"""What a node compresses, what it refuses, and what it tells of arrivals.

T packed tokens, D hidden.
"""

from __future__ import annotations

import pytest
import torch

from nesa_node.compression.codecs import codec_names
from nesa_node.core.ids import PeerId
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.swarm.protocol.link_encoder import PROBE_BYTES, extend_via
from nesa_node.swarm.protocol.messages import (
    MAX_CODECS,
    ErrorMessage,
    Linked,
    Opened,
    Probe,
    Received,
)
from tests.compression.error_bounds import error_bound
from tests.server.bench import Peer, open_node

SLOW = 1e6
LONG = 300


async def linked(peer: Peer, quality: str, codecs: tuple[str, ...] = codec_names()) -> None:
    peer.open(quality=quality, codecs=codecs, max_tokens=2 * LONG)
    opened = await peer.wire.hear_a(Opened)
    assert set(opened.codecs) == set(codec_names())
    peer.link()


@pytest.mark.parametrize(
    "codec", ["bfloat16", "int8@2:16:8", "int8@2:32:8", "int4@2:32:48", "lossless"]
)
async def test_client_is_answered_in_the_codec_that_it_named(
    blocks: ModelBlocks, codec: str
) -> None:
    hidden_TD = torch.randn(LONG, blocks.hidden_size)
    outputs = {}
    async with open_node(blocks) as node:
        for quality in ("exact", codec):
            peer = node.peer(quality)
            await linked(peer, quality)
            await peer.wire.hear_a(Linked)
            peer.step({0: LONG}, hidden_TD)
            message, outputs[quality] = await peer.output()
            assert message.tensor.codec == ("none" if quality == "exact" else codec)
            assert message.via == (() if quality == "exact" else (message.tensor.codec,))
            await peer.end()
    # The two may have been computed in other pieces, and differ in their last bits.
    bound_TD = 1e-4 + 1.01 * error_bound(outputs["exact"], codec=codec)
    assert ((outputs[codec] - outputs["exact"]).abs() <= bound_TD).all()


async def test_client_that_decodes_nothing_is_sent_nothing_compressed(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        await linked(peer, "int8@2:16:8", codecs=())
        await peer.wire.hear_a(Linked)
        peer.step({0: LONG})
        message, _ = await peer.output()
        assert message.tensor.codec == "none"
        await peer.end()


@pytest.mark.parametrize("quality", ["exact", "high", "lossless", "int8@2:32:8"])
async def test_step_below_the_floor_is_refused_and_changes_nothing(
    blocks: ModelBlocks, quality: str
) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        await linked(peer, quality)
        peer.step({0: LONG}, codec="int4@2:32:48")
        refusal = await peer.wire.hear_a(ErrorMessage)
        assert (refusal.code, refusal.fatal, refusal.answers) == ("bad_tensor", False, "step")
        assert "int4@2:32:48" in refusal.message
        assert quality in refusal.message
        peer.lengths = [0]
        peer.step({0: LONG}, codec="lossless")
        await peer.output()
        await peer.end()


async def test_nothing_is_compressed_before_the_link(blocks: ModelBlocks) -> None:
    """bitsandbytes would be loaded on the event loop."""
    async with open_node(blocks) as node:
        peer = node.peer()
        peer.open(quality="blockwise8@2:64:8", codecs=codec_names(), max_tokens=LONG)
        await peer.wire.hear_a(Opened)
        peer.step({0: 8})
        message, _ = await peer.output()
        assert message.tensor.codec == "none"
        await peer.end()


def test_via_keeps_to_what_a_message_may_hold() -> None:
    via: tuple[str, ...] = ()
    for _ in range(3 * MAX_CODECS):
        via = extend_via(via, "int8@2:16:8")
    assert len(via) == MAX_CODECS


@pytest.mark.parametrize("quality", ["best", "int8", "int8:16:8", "int8@2:7", "", "int8:64@9"])
async def test_unknown_quality_is_refused(blocks: ModelBlocks, quality: str) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        peer.open(quality=quality)
        refusal = await peer.wire.hear_a(ErrorMessage)
        assert refusal.code in ("unknown_quality", "bad_frame")


async def test_link_without_reports_is_probed_and_a_slow_one_compressed_for(
    blocks: ModelBlocks,
) -> None:
    async with open_node(blocks) as node:
        peer = node.peer("far")
        await linked(peer, "high")
        probe = await peer.wire.hear_a(Probe)
        assert probe.tensor.nbytes == min(PROBE_BYTES, 2 * LONG * blocks.hidden_size * 4)
        await peer.wire.hear_a(Linked)
        peer.step({0: LONG})
        before, _ = await peer.output()
        peer.wire.say(Received(nbytes=probe.tensor.nbytes, seconds=probe.tensor.nbytes / SLOW))
        peer.step({0: LONG})
        after, _ = await peer.output()
        assert (before.tensor.codec, after.tensor.codec) == ("none", "int8@2:16:8")
        assert node.speeds.link_to(PeerId("far")).rate_bytes_per_s == pytest.approx(SLOW)
        await peer.end()


@pytest.mark.parametrize(("quality", "told"), [("exact", False), ("high", True)])
async def test_arrivals_are_told_only_where_somebody_can_use_them(
    blocks: ModelBlocks, quality: str, told: bool
) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        await linked(peer, quality)
        await peer.wire.hear_a(Linked)
        peer.wire.arrival = Received(nbytes=100_000, seconds=0.5)
        peer.step({0: 1})
        message, _ = await peer.wire.hear()
        assert isinstance(message, Received) == told
        if told:
            assert message == Received(nbytes=100_000, seconds=0.5)
            await peer.output()
        await peer.end()
