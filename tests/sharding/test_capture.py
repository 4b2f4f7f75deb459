"""Graphs of torch modules: what is an operation, what it costs, and what cannot be captured."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nesa_node.core.errors import UnsupportedFeatureError
from nesa_node.sharding.capture import capture


class Branches(nn.Module):
    """Tied weights, a constant mask, a split, and a value that skips."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.middle = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(ids)
        first, second = hidden.view(-1, 8).split(4, dim=-1)
        mask = torch.arange(4).float() * 2
        joined = torch.cat([self.middle(first) + mask, second * mask], dim=-1)
        return {"logits": self.head(joined), "joined": joined}


def test_operations_and_values() -> None:
    captured = capture(Branches(), (torch.zeros(1, 3, dtype=torch.long),))
    graph = captured.graph
    kinds = [each.kind.removeprefix("aten.").partition(".")[0] for each in graph.operations]
    assert sorted(kinds) == ["add", "cat", "embedding", "linear", "linear", "mul"]
    # What is made of no input is no operation, and views belong to what they are views of.
    assert kinds[0] == "embedding"
    assert [name.partition("_")[0] for name in captured.nodes[0]] == [
        "embedding",
        "view",
        "split",
        "getitem",
        "getitem",
    ]
    assert len(graph.outputs[0]) == 2
    assert [value.size_bytes for value in graph.values if value.producer is None] == [3 * 8]
    outputs = [value for value in graph.values if value.is_output]
    assert sorted(value.size_bytes for value in outputs) == [3 * 8 * 4, 3 * 10 * 4]
    # The embedding's weights are the head's.
    assert sorted(graph.parameter_bytes) == [4 * 4 * 4, 10 * 8 * 4]
    assert graph.total_parameter_bytes == 64 + 320
    (head,) = [each for each in graph.operations if each.flop == 2 * 3 * 8 * 10]
    assert head.parameters == graph.operations[0].parameters
    assert head.moved_bytes == 3 * 8 * 4 + 320 + 3 * 10 * 4


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2)
        self.query = nn.Linear(8, 16)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.first(image).flatten(2).transpose(1, 2)
        query = self.query(hidden).view(1, -1, 2, 8).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(query, query, query)
        return mixed @ mixed.transpose(-1, -2)


def test_arithmetic_is_what_torch_counts() -> None:
    module, image = Convolutions(), torch.randn(1, 3, 17, 17)
    # Of attention it counts products only.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(image)
    assert capture(module, (image,)).graph.total_flop == counter.get_total_flops()


def test_no_memory_is_needed() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(50_000, 50_000), nn.ReLU())
        graph = capture(module, (torch.empty(1, 50_000),)).graph
    assert graph.total_parameter_bytes == 4 * (50_000**2 + 50_000)


class Choosing(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values + 1 if values.sum() > 0 else values


class Failing(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        raise ValueError("")


@pytest.mark.parametrize(
    ("module", "place"),
    [
        (Choosing(), 'at "return values + 1 if values.sum() > 0 else values" (test_capture.py'),
        (Failing(), 'at "raise ValueError("")" (test_capture.py'),
        (nn.Linear(3, 3), "same reduction dim"),
    ],
)
def test_what_cannot_be_captured(
    module: nn.Module,
    place: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(UnsupportedFeatureError, match="cannot be captured") as caught:
        capture(module, (torch.zeros(2),))
    message = str(caught.value)
    assert message.startswith(type(module).__name__)
    assert "\n" not in message
    assert place in message
    assert capfd.readouterr() == ("", "")
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_an_output_may_be_an_input() -> None:
    class Same(nn.Module):
        def forward(self, one: Tensor, other: Tensor) -> tuple[Any, ...]:
            return one, one + other, None

    graph = capture(Same(), (torch.zeros(2), torch.zeros(2))).graph
    assert [(value.producer, value.is_output) for value in graph.values] == [
        (None, True),
        (None, False),
        (0, True),
    ]
