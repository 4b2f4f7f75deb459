"""What a prompt and a codec change in the choice of a chain."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chain_request import (
    PROMPT_OVERLAP,
    Chain,
    ChainRequest,
    Visit,
    build_problem,
    step_time,
)
from nesa_node.routing.search.exact import exact_latency
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.snapshot import NodeState, Snapshot

A, B = PeerId("a"), PeerId("b")
BLOCKS = 6


def test_seconds_of_a_prompt_are_those_done_by_hand() -> None:
    """A share for each of ten steps; the client gets the last token of a prompt alone."""
    a = NodeState(A, Span(0, 4), decode_tokens_per_s=25.0, prefill_tokens_per_s=100.0)
    b = NodeState(B, Span(4, 6), decode_tokens_per_s=50.0, prefill_tokens_per_s=400.0)
    rtt_ms_NN = np.array([[0.0, 60.0], [60.0, 0.0]])
    rate_NN = np.array([[np.inf, 5e5], [5e5, np.inf]])
    links = Links((A, B), rtt_ms_NN, rate_NN, np.zeros((2, 2)), np.ones((2, 2)))
    request = ChainRequest(
        span=Span(0, 6),
        prompt_tokens=300,
        output_tokens=10,
        bytes_per_token=1000.0,
        entry_rtt_ms={A: 20.0, B: 40.0},
        entry_bytes_per_s={A: 1e5, B: 1e5},
        exit_bytes_per_s={A: 1e6, B: 1e6},
        visit_s=0.0,
    )
    problem = build_problem(Snapshot(ModelId("m@0"), 6, (a, b), 0.0, links=links), request)
    got = step_time(problem, (Visit(0, 0, 4), Visit(1, 4, 6)))
    share = PROMPT_OVERLAP / 10
    assert got.compute_s == pytest.approx(1 / 25 + 1 / 50 + share * (300 / 100 + 300 / 400))
    assert got.entry_s == pytest.approx(0.010 + 1000 / 1e5 + share * 300_000 / 1e5)
    assert got.transfer_s == pytest.approx(0.030 + 1000 / 5e5 + share * 300_000 / 5e5)
    assert got.exit_s == pytest.approx(0.020 + 1000 / 1e6)


def test_a_link_takes_as_long_as_the_request_says_of_its_messages() -> None:
    node = NodeState(A, Span(0, 1))
    request = ChainRequest(
        span=Span(0, 1),
        bytes_per_token=1000.0,
        entry_rtt_ms={A: 0.0},
        entry_bytes_per_s={A: 1e5},
        exit_bytes_per_s={A: 1e4},
        prompt_tokens=20,
        output_tokens=5,
        message_s=lambda nbytes, rate: 0.25 * nbytes / rate + 0.001,
    )
    problem = build_problem(Snapshot(ModelId("m@0"), 1, (node,), 0.0), request)
    token_s, prompt_s = 0.25 * 1000 / 1e5 + 0.001, 0.25 * 20_000 / 1e5 + 0.001
    assert problem.entry_s_N[0] == pytest.approx(token_s + PROMPT_OVERLAP * prompt_s / 5)
    assert problem.exit_s_N[0] == pytest.approx(0.25 * 1000 / 1e4 + 0.001)


@pytest.mark.parametrize("fields", [{"prompt_tokens": -1}, {"output_tokens": 0}])
def test_a_prompt_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no prompt of"):
        ChainRequest(span=Span(0, 1), **fields)


def _make_swarm(rng: np.random.Generator) -> tuple[Snapshot, ChainRequest]:
    """Eight nodes; prefill is 3 to 40 times as fast as decoding, links are slow or fast."""
    nodes = []
    for index in range(8):
        start = 0 if index < 2 else int(rng.integers(0, BLOCKS))
        end = BLOCKS if index < 2 else int(rng.integers(start + 1, BLOCKS + 1))
        speed = rng.choice([20, 40, 80, 160]) * rng.uniform(0.7, 1.4) * 3 / (end - start)
        nodes.append(
            NodeState(
                PeerId(f"n{index}"),
                Span(start, end),
                decode_tokens_per_s=speed,
                prefill_tokens_per_s=speed * rng.choice([3, 10, 40]),
                load=float(rng.choice([0.0, 0.3, 1.0])),
            )
        )
    rtt_ms_NN = rng.uniform(5, 120, (8, 8))
    rtt_ms_NN = (rtt_ms_NN + rtt_ms_NN.T) / 2
    np.fill_diagonal(rtt_ms_NN, 0.0)
    up_N = rng.choice([1.25e6, 5e6, 2.5e7], 8)
    rate_NN = np.minimum(up_N[:, None], up_N[None])
    peers = tuple(node.peer_id for node in nodes)
    links = Links(peers, rtt_ms_NN, rate_NN, np.zeros((8, 8)), np.ones((8, 8)))
    rate_N = np.minimum(up_N, float(rng.choice([6e5, 2.5e6])))
    request = ChainRequest(
        span=Span(0, BLOCKS),
        bytes_per_token=8192.0,
        entry_rtt_ms=rng.uniform(5, 120, 8),
        entry_bytes_per_s=rate_N,
        exit_bytes_per_s=rate_N,
    )
    return Snapshot(ModelId("m@0"), BLOCKS, tuple(nodes), 0.0, links=links), request


def _session_s(snapshot: Snapshot, request: ChainRequest, chain: Chain, output: int) -> float:
    """Seconds of a session by a schedule: chunks pass each link and node one after another."""
    decode_s = step_time(build_problem(snapshot, replace(request, prompt_tokens=0)), chain).total_s
    count = math.ceil(request.prompt_tokens / 128)
    chunk = replace(request, prompt_tokens=0, tokens=request.prompt_tokens // count)
    problem, far = build_problem(snapshot, chunk), replace(chunk, bytes_per_token=0.0)
    way = build_problem(snapshot, far)
    # Stages: seconds that occupy the link or node, and seconds on the way after it.
    first = chain[0].node
    stages = [(problem.entry_s_N[first] - way.entry_s_N[first], way.entry_s_N[first])]
    for visit, after in pairwise((*chain, None)):
        assert visit is not None
        blocks = visit.end - visit.start
        busy_s = problem.busy_block_s_N[visit.node] * blocks + problem.visit_s_N[visit.node]
        stages.append((busy_s, 0.0))
        if after is not None:
            way_s = way.transfer_s_NN[visit.node, after.node]
            stages.append((problem.transfer_s_NN[visit.node, after.node] - way_s, way_s))
    free_at, at = [0.0] * len(stages), 0.0
    for _ in range(count):
        at = 0.0
        for stage, (busy_s, way_s) in enumerate(stages):
            free_at[stage] = max(at, free_at[stage]) + busy_s
            at = free_at[stage] + way_s
    return at + output * decode_s


@pytest.mark.parametrize(("prompt", "output", "saved"), [(4000, 50, 0.05), (500, 20, 0.03)])
def test_chains_for_long_prompts_make_sessions_shorter(
    prompt: int, output: int, saved: float
) -> None:
    """Against the chain for a decoded token, in the mean over 80 swarms."""
    rng, ratios = np.random.default_rng(2), []
    for _ in range(80):
        snapshot, decoding = _make_swarm(rng)
        request = replace(decoding, prompt_tokens=prompt, output_tokens=output)
        seconds = [
            _session_s(snapshot, request, exact_latency(build_problem(snapshot, each)), output)
            for each in (request, decoding)
        ]
        ratios.append(seconds[0] / seconds[1])
    assert np.mean(ratios) < 1 - saved
