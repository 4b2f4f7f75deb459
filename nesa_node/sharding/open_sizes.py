"""Sizes that a captured graph leaves open (batch, length, image size), and what follows of them.

torch.export gives each of them a symbol, and all other sizes as expressions of symbols.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from nesa_node.core.errors import UnsupportedFeatureError

Sizes = tuple[int, ...]
"""A value for each symbol of a graph, in their order."""
MAX_CACHED_SIZES = 1 << 16


class OpenSizes:
    """The shapes that a graph's inputs may have."""

    def __init__(self, inputs: Sequence[Node]) -> None:
        """`inputs` are an exported program's placeholders of tensors that the network is given."""
        self._names = tuple(node.name for node in inputs)
        self._shapes: tuple[tuple[Any, ...], ...] = tuple(
            tuple(map(as_expression, node.meta["val"].shape)) for node in inputs
        )
        found = {each for shape in self._shapes for size in shape for each in _symbols_of(size)}
        self.symbols: tuple[Any, ...] = tuple(sorted(found, key=str))
        """sympy's, ordered by name."""
        self._conditions = _find_conditions(inputs, found)
        self._cache: dict[tuple[Any, Sizes], int] = {}

    def bind(self, shapes: Sequence[Sequence[int]]) -> Sizes:
        """The symbols' values for inputs of these shapes.

        Raises `UnsupportedFeatureError` for shapes that the graph was not captured for.
        """
        values: dict[Any, int] = {}
        for expected, shape in zip(self._shapes, shapes, strict=True):
            if len(expected) == len(shape):
                values |= {
                    size: got
                    for size, got in zip(expected, shape, strict=True)
                    if _is_symbol(size) and size not in values
                }
        sizes = tuple(values.get(symbol, 0) for symbol in self.symbols)
        for index, (name, shape) in enumerate(zip(self._names, shapes, strict=True)):
            expected = self._shapes[index]
            if len(expected) != len(shape) or tuple(shape) != self.evaluate_all(expected, sizes):
                raise UnsupportedFeatureError(
                    f"{name} has the shape {list(shape)}, and the graph was captured for "
                    f"{self._show(index, values)}"
                )
        for condition in self._conditions:
            if not condition.xreplace(dict(zip(self.symbols, sizes, strict=True))):
                given = dict(zip(self._names, map(list, shapes), strict=True))
                raise UnsupportedFeatureError(
                    f"the graph was not captured for inputs of these shapes ({given}): it needs "
                    f"{self._name_sizes(str(condition))}"
                )
        return sizes

    def _show(self, index: int, values: Mapping[Any, int]) -> str:
        """The shape of an input, with the sizes that inputs before it have."""
        before = {size for shape in self._shapes[:index] for size in shape if _is_symbol(size)}
        shown = (
            "any" if _is_symbol(size) and size not in before else str(values.get(size, size))
            for size in self._shapes[index]
        )
        return f"[{', '.join(shown)}]"

    def _name_sizes(self, condition: str) -> str:
        """A condition with names of inputs' dimensions in place of symbols."""
        names = {
            str(size): f"{name}.shape[{index}]"
            for name, shape in zip(self._names, self._shapes, strict=True)
            for index, size in enumerate(shape)
            if _is_symbol(size)
        }
        return re.sub(r"\w+", lambda found: names.get(found[0], found[0]), condition)

    def evaluate(self, size: Any, sizes: Sizes) -> int:
        """The value of an expression of symbols, or of a plain number."""
        if isinstance(size, int):
            return size
        key = (size, sizes)
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= MAX_CACHED_SIZES:
                self._cache.clear()
            found = int(size.xreplace(dict(zip(self.symbols, sizes, strict=True))))
            self._cache[key] = found
        return found

    def evaluate_all(self, shape: Sequence[Any], sizes: Sizes) -> tuple[int, ...]:
        """The shape that these expressions stand for."""
        return tuple(self.evaluate(size, sizes) for size in shape)


def as_expression(size: Any) -> Any:
    """An int, or sympy's expression of a symbolic size."""
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def _symbols_of(size: Any) -> set[Any]:
    return set() if isinstance(size, int) else set(size.free_symbols)


def _is_symbol(size: Any) -> bool:
    return not isinstance(size, int) and bool(size.is_symbol)


def _find_conditions(inputs: Sequence[Node], symbols: set[Any]) -> tuple[Any, ...]:
    """What torch took for granted of symbols while it traced."""
    for node in inputs:
        for size in node.meta["val"].shape:
            if isinstance(size, torch.SymInt):
                guards = size.node.shape_env.guards
                found = (each.expr for each in guards)
                return tuple(each for each in found if each.free_symbols <= symbols)
    return ()
