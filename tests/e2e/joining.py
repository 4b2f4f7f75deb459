"""Clients of a test's swarm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.settings.choices import RouteName

ROUTES: tuple[RouteName, ...] = ("chain", "star")


@contextmanager
def joined(
    folder: Path, addresses: Sequence[str], route: RouteName, **options: Any
) -> Iterator[DistributedModelForCausalLM]:
    """A model whose client has joined already: a test ends with the processes it began with.

    Without audits, unless asked for: draws would differ from run to run.
    """
    with AutoDistributedModelForCausalLM.from_pretrained(
        folder,
        initial_peers=addresses,
        routing=route,
        **{"dtype": torch.float32, "audit": 0.0, **options},
    ) as model:
        with model.inference_session(max_length=1):
            pass
        yield model


@contextmanager
def both_routes(
    folder: Path, addresses: Sequence[str], **options: Any
) -> Iterator[dict[RouteName, DistributedModelForCausalLM]]:
    with (
        joined(folder, addresses, "chain", **options) as chain,
        joined(folder, addresses, "star", **options) as star,
    ):
        yield {"chain": chain, "star": star}
