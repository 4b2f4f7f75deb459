"""Values of a graph as a payload, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nesa_node.core.errors import ProtocolError
from nesa_node.swarm.protocol.graph_messages import ALIGNMENT, ITEM_BYTES, ValueMeta

_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def encode_values(values: Mapping[int, Tensor]) -> tuple[tuple[ValueMeta, ...], bytearray]:
    """Describe and join tensors of any shape. Raises `ProtocolError("bad_tensor")`."""
    metas, payload = [], bytearray()
    for index, tensor in values.items():
        name = _NAMES.get(tensor.dtype)
        if name is None:
            raise ProtocolError("bad_tensor", f"a {tensor.dtype} tensor cannot be sent")
        meta = ValueMeta(index, name, tuple(tensor.shape))  # type: ignore[arg-type]
        metas.append(meta)
        payload += bytes(-len(payload) % ALIGNMENT)
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        # A single number may have any stride, also where torch calls it contiguous.
        payload += plain.as_strided(plain.shape, (1,)).view(torch.uint8).numpy().data
    return tuple(metas), payload


def decode_values(values: tuple[ValueMeta, ...], payload: bytearray) -> dict[int, Tensor]:
    """The tensors of a payload, of whose memory they become views.

    Raises `ProtocolError("bad_tensor")` where a value is there twice.
    """
    found: dict[int, Tensor] = {}
    start = 0
    for meta in values:
        if meta.value in found:
            raise ProtocolError("bad_tensor", f"value {meta.value} is there twice")
        start += -start % ALIGNMENT
        found[meta.value] = _decode(meta, payload, start)
        start += meta.nbytes
    return found


def _decode(meta: ValueMeta, payload: bytearray, start: int) -> Tensor:
    dtype = _DTYPES[meta.dtype]
    if not meta.nbytes:
        try:
            return torch.empty(meta.shape, dtype=dtype)
        except RuntimeError:  # beside a 0, numbers whose product no tensor may have
            raise ProtocolError("bad_tensor", f"no tensor is {list(meta.shape)}") from None
    count = meta.nbytes // dtype.itemsize
    if dtype is torch.bool:
        # Other bytes than 0 and 1 are no truth values.
        raw = torch.frombuffer(payload, dtype=torch.uint8, count=count, offset=start)
        return raw.ne(0).view(meta.shape)
    return torch.frombuffer(payload, dtype=dtype, count=count, offset=start).view(meta.shape)
