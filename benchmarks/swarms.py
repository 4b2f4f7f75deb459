"""Daemons of this machine and a client of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.options import USERS_THREADS, Options
from nesa_node.cli.services.local_swarm import LocalNode, local_swarm
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.ids import Span, split_evenly
from nesa_node.engine.model.devices import cache_bytes_per_token, compute_block_bytes
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.hub import open_checkpoint

READY_TIMEOUT_S = 300.0
"""Many daemons that start at once on few cores take their time."""
ALL_THREADS = torch.get_num_threads()


@dataclass(frozen=True, slots=True)
class Swarm:
    nodes: list[LocalNode]
    model: DistributedModelForCausalLM
    cache_tokens: int

    @property
    def spans(self) -> list[str]:
        return [str(node.span) for node in self.nodes]


def open_local(folder: Path) -> Checkpoint:
    return open_checkpoint(str(folder), cache_dir=folder)


def daemon_flags(options: Options, cache_tokens: int, threads: int = 1) -> list[str]:
    flags = ["--torch-dtype", options.dtype, "--quant-type", options.quant_type]
    flags += ["--device", options.device]
    flags += [] if threads == USERS_THREADS else ["--threads", str(threads)]
    flags += ["--attn-cache-tokens", str(cache_tokens)]
    # All sessions are those of one client.
    flags += ["--max-sessions-per-peer", "256", "--max-cache-tokens-per-peer", str(cache_tokens)]
    return [*flags, "--log-level", "warning"]


@contextmanager
def open_swarm(
    folder: Path, options: Options, nodes: int, cache_tokens: int, threads: int
) -> Iterator[Swarm]:
    """`nodes` daemons that hold equal parts of the model, each with room for `cache_tokens`.

    `threads` are those of every daemon, and of this process until it is left.
    """
    spans = split_evenly(open_local(folder).num_blocks, nodes)
    with (
        torch_threads(threads),
        TemporaryDirectory(prefix="nesa-bench-") as temporary,
        local_swarm(
            folder,
            spans,
            Path(temporary),
            flags=daemon_flags(options, cache_tokens, threads),
            ready_timeout_s=READY_TIMEOUT_S,
        ) as daemons,
        join(folder, options, [node.addresses[0] for node in daemons]) as model,
    ):
        yield Swarm(daemons, model, cache_tokens)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """For the client and local transformers in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(ALL_THREADS if threads == USERS_THREADS else threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def name_of_threads(threads: int) -> str:
    return "default" if threads == USERS_THREADS else str(threads)


def join(
    folder: Path, options: Options, peers: Sequence[str], *, replicate_cache: bool = False
) -> DistributedModelForCausalLM:
    """A client in this process; close it."""
    return AutoDistributedModelForCausalLM.from_pretrained(
        folder,
        initial_peers=peers,
        dtype=options.torch_dtype,
        device=options.device,
        replicate_cache=replicate_cache,
        # The same prompt is timed again and again.
        reuse_prefix=False,
    )


def share_of_model(folder: Path, options: Options, span: Span, cache_tokens: int) -> dict[str, int]:
    """Bytes of a node's weights and of its cache when full."""
    checkpoint = open_local(folder)
    sizes = compute_block_bytes(checkpoint, options.torch_dtype, options.quant_type)
    weights = sizes[span.start : span.end]
    per_token = cache_bytes_per_token(checkpoint, options.torch_dtype) * len(span)
    return {"span_bytes": sum(weights), "cache_bytes": per_token * cache_tokens}
