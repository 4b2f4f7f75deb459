"""Values that stay the same while a decoder's input grows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nesa_node.sharding.capture import capture
from nesa_node.sharding.dependence import find_fixed_values


class Halves(nn.Module):
    """`text` goes through sin, then meets `made`, or is only repeated as often as it is long."""

    def forward(self, text: Tensor, made: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        encoded = text.sin().cos()
        repeated = encoded.sum(dim=1, keepdim=True).repeat(1, made.shape[1])
        per_item = encoded * made.shape[0]
        return encoded, repeated + made, per_item


def test_values_that_need_no_changing_input_are_fixed() -> None:
    captured = capture(Halves(), (torch.randn(3, 5), torch.randn(3, 4)))
    fixed = find_fixed_values(captured, ["made"])
    kinds = {
        captured.graph.operations[value.producer].kind if value.producer is not None else "": (
            index in fixed
        )
        for index, value in enumerate(captured.graph.values)
        if captured.values[index] not in ("text", "made")
    }
    found = {kind.split(".")[1]: is_fixed for kind, is_fixed in kinds.items()}
    assert found["sin"]
    assert found["cos"]
    assert not found["repeat"], "it has a size of `made`"
    assert not found["add"]
    assert found["mul"], "the batch is that of `text` too"
    names = {captured.values[index] for index in fixed}
    assert "text" in names
    assert "made" not in names
    assert find_fixed_values(captured, []) == set(range(len(captured.values)))
    assert not find_fixed_values(captured, ["text", "made"])
