"""Sizes of inputs that a captured graph leaves open, and those that it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nesa_node.core.errors import UnsupportedFeatureError
from nesa_node.sharding.capture import capture


class Halving(nn.Module):
    """Takes images of any even height, and of 8 columns."""

    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        assert image.shape[2] == 8
        halves = image.view(image.shape[0], image.shape[1] // 2, 2, 8)
        return (halves * mask[:, None, None, :]).mean(dim=2)


def test_shapes_are_bound() -> None:
    captured = capture(Halving(), (torch.zeros(1, 6, 8), torch.zeros(1, 8)))
    sizes = captured.sizes
    assert len(sizes.symbols) == 2
    bound = sizes.bind([(3, 10, 8), (3, 8)])
    assert sorted(bound) == [3, 10]
    assert captured.example_sizes == sizes.bind([(1, 6, 8), (1, 8)])


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(3, 10, 9), (3, 9)], r"captured for \[any, any, 8\]"),  # the width was fixed
        ([(3, 10, 8), (2, 8)], r"\[2, 8\], and the graph was captured for \[3, 8\]"),  # other masks
        ([(3, 10), (3, 8)], r"captured for \[any, "),
        ([(3, 9, 8), (3, 8)], r"needs Eq\(Mod\(image.shape\[1\], "),  # an odd height
    ],
)
def test_other_shapes_are_refused(shapes: list[tuple[int, ...]], expected: str) -> None:
    captured = capture(Halving(), (torch.zeros(1, 6, 8), torch.zeros(1, 8)))
    with pytest.raises(UnsupportedFeatureError, match=expected):
        captured.sizes.bind(shapes)


class InPlace(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        made = values + 1
        made[:, 0] = 5
        return made.relu_() + values


def test_values_that_are_written_to_become_others() -> None:
    """What one piece has sent, no other piece changes."""
    captured = capture(InPlace(), (torch.zeros(2, 3),))
    targets = [node.target for node in captured.program.graph.nodes]
    names = {str(target) for target in targets}
    assert not any("relu_.default" in name or "fill_" in name for name in names), names


def test_a_digest_is_of_the_graph() -> None:
    one, same = (capture(Halving(), (torch.zeros(1, 6, 8), torch.zeros(1, 8))) for _ in range(2))
    assert one.digest == same.digest
    assert capture(InPlace(), (torch.zeros(2, 3),)).digest != one.digest


class Windows(nn.Module):
    """Pads to windows of several widths in turn, as Swin does at its depths."""

    def forward(self, values: Tensor) -> Tensor:
        for width in (4, 3, 5, 7):
            missing = (width - values.shape[1] % width) % width
            values = nn.functional.pad(values, (0, missing))
            values = values.view(values.shape[0], -1, width).transpose(1, 2).flatten(1)[:, 1:]
        return values


def test_sizes_that_become_long_expressions_are_fixed() -> None:
    """sympy would compare them for minutes; the batch stays open."""
    captured = capture(Windows(), (torch.zeros(1, 50),))
    assert len(captured.sizes.symbols) == 1
    assert captured.sizes.bind([(3, 50)]) == (3,)
    with pytest.raises(UnsupportedFeatureError, match="captured for"):
        captured.sizes.bind([(3, 51)])
