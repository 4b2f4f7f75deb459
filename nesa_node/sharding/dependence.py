"""Which values of a captured graph stay the same while some of its inputs change."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from nesa_node.sharding.capture import CapturedModel, is_size


def find_fixed_values(captured: CapturedModel, changing: Collection[str]) -> frozenset[int]:
    """Indices of `graph.values` that depend on none of the `changing` placeholders.

    Neither on their values nor on sizes that no other input has.
    """
    nodes = captured.program.graph.nodes
    given = set(captured.program.graph_signature.user_inputs)
    inputs = [node for node in nodes if node.op == "placeholder" and node.name in given]
    fixed_sizes: set[Any] = set()
    for node in inputs:
        if node.name not in changing:
            fixed_sizes |= _symbols(node.meta.get("val"))
    changed = {node for node in inputs if node.name in changing}
    for node in nodes:
        if is_size(node):
            if not _symbols(node.meta["val"]) <= fixed_sizes:
                changed.add(node)
        elif any(each in changed for each in node.all_input_nodes):
            changed.add(node)
    names = {node.name for node in changed}
    return frozenset(index for index, name in enumerate(captured.values) if name not in names)


def _symbols(value: Any) -> set[Any]:
    sizes = getattr(value, "shape", (value,))
    found: set[Any] = set()
    for size in sizes:
        expression = getattr(getattr(size, "node", None), "expr", None)
        if expression is not None:
            found |= expression.free_symbols
    return found
