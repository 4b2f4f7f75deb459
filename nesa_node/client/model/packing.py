"""Packing of padded batches into tokens to send, and unpacking of the results.

B rows, L columns of new tokens, T packed tokens, K kept columns, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nesa_node.client.session.base import Want
from nesa_node.core.errors import UnsupportedFeatureError


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Padded batch, of which rows are sent without padding. `sent_BL=None` means that all columns
    are sent.
    """

    row_ids: Sequence[torch.Tensor]
    sent_BL: torch.Tensor | None
    columns: int

    def choose_want(self, logits_to_keep: int | torch.Tensor) -> Want:
        """ "last" if the kept columns need only the last token of each row, else "all"."""
        if isinstance(logits_to_keep, torch.Tensor) or (logits_to_keep != 1 and self.columns != 1):
            return "all"
        every_row_ends_here = self.sent_BL is None or bool(self.sent_BL[:, -1].all())
        return "last" if every_row_ends_here else "all"

    def logits(
        self,
        hidden_TD: torch.Tensor,
        want: Want,
        logits_to_keep: int | torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Logits [B, K, V] of the kept columns; zeros in columns that were not sent.

        `hidden_TD` is the output of a step with `want`. `logits_to_keep` is as in transformers'
        `forward`: the number of last columns, 0 for all, or a tensor of column indices.
        """
        logits_BKV = self._unpack(hidden_TD, want, logits_to_keep, head)
        # Blocks and head run in inference mode; callers may modify the result in place.
        return logits_BKV.clone() if logits_BKV.is_inference() else logits_BKV

    def _unpack(
        self,
        hidden_TD: torch.Tensor,
        want: Want,
        logits_to_keep: int | torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        rows = len(self.row_ids)
        if want == "last":
            return head(hidden_TD).unsqueeze(1)
        kept = (
            logits_to_keep
            if isinstance(logits_to_keep, torch.Tensor)
            else slice(-logits_to_keep if logits_to_keep else None, None)
        )
        if self.sent_BL is None:
            hidden_BKD = hidden_TD.view(rows, self.columns, -1)[:, kept]
            logits_TV = head(hidden_BKD.flatten(0, 1))
            return logits_TV.view(rows, hidden_BKD.shape[1], logits_TV.shape[-1])
        index_BL = self.sent_BL.flatten().cumsum(0).view_as(self.sent_BL) - 1
        sent_BK = self.sent_BL[:, kept]
        logits_TV = head(hidden_TD[index_BL[:, kept][sent_BK].to(hidden_TD.device)])
        logits_BKV = logits_TV.new_zeros((*sent_BK.shape, logits_TV.shape[-1]))
        logits_BKV[sent_BK.to(logits_BKV.device)] = logits_TV
        return logits_BKV


def pack(
    ids_BL: torch.Tensor, mask_BL: torch.Tensor | None, skip: Sequence[int] | None = None
) -> PackedBatch:
    """Pack the columns that `mask_BL` shows (nonzero), less each row's first `skip[row]` tokens."""
    if mask_BL is not None and bool(mask_BL.all()):
        mask_BL = None
    if mask_BL is None and not (skip and any(skip)):
        return PackedBatch(ids_BL.unbind(0), None, ids_BL.shape[1])
    sent_BL = torch.ones_like(ids_BL, dtype=torch.bool) if mask_BL is None else mask_BL != 0
    if skip is not None:
        start_B = torch.tensor(skip, device=sent_BL.device)
        sent_BL = sent_BL & (sent_BL.cumsum(1) > start_B.unsqueeze(1))
    row_ids = [ids_L[sent_L] for ids_L, sent_L in zip(ids_BL, sent_BL, strict=True)]
    return PackedBatch(row_ids, sent_BL, ids_BL.shape[1])


def check_mask(mask_BC: torch.Tensor | None, columns: int) -> None:
    """Raise `UnsupportedFeatureError` or `ValueError` for a mask of another shape."""
    if mask_BC is None:
        return
    if mask_BC.ndim != 2:
        raise UnsupportedFeatureError(
            "attention_mask must be [rows, columns] of 0 and 1: other masks cannot be sent"
        )
    if mask_BC.shape[1] != columns:
        raise ValueError(
            f"attention_mask has {mask_BC.shape[1]} columns, cache and input have {columns}"
        )
