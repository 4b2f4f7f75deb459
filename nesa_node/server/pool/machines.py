"""A machine of the pool as plans see it, from its offer and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nesa_node.routing.placement.building import HOP_S, ModelShape, PoolMachine
from nesa_node.swarm.dht.pool_notices import MAX_HELD_MODELS, AssignedSpan, HeldModel, Offer

Holding = AssignedSpan | HeldModel


def pool_machine(
    offer: Offer,
    name: str,
    shape: ModelShape,
    held: Mapping[str, Holding],
    shapes: Mapping[str, ModelShape],
    *,
    hop_s: float = HOP_S,
    slowdown: Callable[[str], float] = lambda kind: 1.0,
) -> PoolMachine | None:
    """The machine as a candidate for the model `name` of `shape`; None if it may not hold it.

    `held` and `shapes` are by a model's name: what the machine holds or is to hold, and the shapes
    that are known. `slowdown` of a kind of weights says how much slower than its figures the
    machine was seen to be.
    """
    shown = {each.model for each in offer.held}
    if name in held or name in shown or len(held) >= MAX_HELD_MODELS:
        return None
    if not offer.allows(name, shape.family, shape.least_download_bytes):
        return None
    figures = {
        kind: each.weight_figures().slowed(slowdown(kind)) for kind, each in offer.figures.items()
    }
    room, most = free_bytes(offer, held, shapes), offer.max_download_bytes
    return PoolMachine(offer.signer, room, figures, offer.quant_types, hop_s, most)


def free_bytes(offer: Offer, held: Mapping[str, Holding], shapes: Mapping[str, ModelShape]) -> int:
    """What is allowed less all that is held, and what is free less what still loads.

    None is free where a model is held whose shape is not known. Spans that their model cannot have
    take nothing: offers are untrusted.
    """
    taken, loading = 0, 0
    serving = {each.model for each in offer.held if each.state == "serving"}
    for name, holding in held.items():
        shape = shapes.get(name)
        if shape is None:
            return 0
        if may_be_held(holding, shape):
            size = shape.held_bytes(holding.blocks, holding.quant_type)
            taken += size
            loading += 0 if name in serving else size
    return max(0, min(offer.memory_total_bytes - taken, offer.memory_free_bytes - loading))


def may_be_held(holding: Holding, shape: ModelShape) -> bool:
    """Whether a model of this shape has such blocks, and such weights."""
    return holding.blocks.end <= shape.num_blocks and holding.quant_type in shape.block_bytes
