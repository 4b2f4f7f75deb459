"""Cache object for transformers' `past_key_values`: column counts here, keys and values on nodes.

B rows, L new columns, C all columns, V vocabulary.
"""

from __future__ import annotations

import torch

from nesa_node.client.model.inference_session import InferenceSession
from nesa_node.client.model.layers import HiddenStateSelection
from nesa_node.client.model.packing import PackedBatch, check_mask, pack
from nesa_node.core.errors import UnsupportedFeatureError


class SessionCache:
    """Columns of a padded batch that went through one session, padding included.

    With `match_prefix` the first batch is a text from its beginning: tokens that the session
    already holds are not sent again unless their logits are wanted, and what it holds beyond the
    common prefix is rolled back.
    """

    is_compileable = False
    is_croppable = True

    def __init__(
        self, session: InferenceSession | None = None, *, match_prefix: bool = False
    ) -> None:
        self.session = session
        self.prompt_BL: torch.Tensor | None = None
        self.prompt_mask_BL: torch.Tensor | None = None
        self.output_hidden_states: HiddenStateSelection = None
        """Value of `generate`'s option of that name."""
        self._match_prefix = match_prefix
        self._columns = 0
        self._mask_BC: torch.Tensor | None = None
        if session is not None and not match_prefix:
            if len(set(session.lengths)) != 1:
                raise ValueError("rows of different lengths: continue them with session.step()")
            self._columns = session.position

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of columns so far, padding included."""
        return self._columns

    def get_max_length(self) -> int:
        return self.require_session().max_length

    def activate_past_recording(self) -> None:
        """Do nothing: `crop` is always possible."""

    def add_columns(
        self,
        ids_BL: torch.Tensor,
        attention_mask: torch.Tensor | None,
        logits_to_keep: int | torch.Tensor = 0,
    ) -> PackedBatch:
        """Append new columns; return the tokens of them that the session has to run.

        `attention_mask` [B, C] covers the earlier columns as well, as in transformers, and must
        hide the same ones as before.
        """
        session = self.require_session()
        session.check_batch(ids_BL)
        columns = self._columns + ids_BL.shape[1]
        mask_BL = self._new_mask_columns(attention_mask, columns)
        batch = pack(ids_BL, mask_BL)
        if self._match_prefix:
            self._match_prefix = False
            wanted = logits_to_keep if isinstance(logits_to_keep, int) else 0
            # Columns before those with wanted logits; `[:, :-0]` is empty, as intended.
            before = pack(ids_BL[:, :-wanted], None if mask_BL is None else mask_BL[:, :-wanted])
            texts = [ids_L.tolist() for ids_L in before.row_ids]
            batch = pack(ids_BL, mask_BL, session.keep_common_prefix(texts))
        self._columns = columns
        return batch

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns, as transformers' `crop` does."""
        if tokens_to_remove > 0 or -tokens_to_remove > self._columns:
            raise ValueError(f"cannot crop {self._columns} columns by {tokens_to_remove}")
        if tokens_to_remove == 0:
            return
        session = self.require_session()
        removed = [-tokens_to_remove] * session.rows
        if self._mask_BC is not None:
            removed = self._mask_BC[:, tokens_to_remove:].ne(0).sum(1).tolist()
            self._mask_BC = self._mask_BC[:, :tokens_to_remove]
        session.rollback([held - less for held, less in zip(session.lengths, removed, strict=True)])
        self._columns += tokens_to_remove

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each row continue as a copy of row `beam_idx[row]`."""
        self.require_session().reorder(beam_idx.tolist())
        if self._mask_BC is not None:
            self._mask_BC = self._mask_BC[beam_idx.to(self._mask_BC.device)]

    def prompt_rows(self, mask_BL: torch.Tensor | None) -> list[list[int]] | None:
        """Token ids of each row of the first batch without padding; None if unknown."""
        if self.prompt_BL is None:
            return None
        return [ids_L.tolist() for ids_L in pack(self.prompt_BL, mask_BL).row_ids]

    def require_session(self) -> InferenceSession:
        if self.session is None:
            raise ValueError("this cache has no session yet: let generate() open it")
        return self.session

    def _new_mask_columns(self, mask_BC: torch.Tensor | None, columns: int) -> torch.Tensor | None:
        """Mask of the new columns [B, L]; None where nothing is hidden."""
        if mask_BC is None:
            if self._mask_BC is not None and not bool(self._mask_BC.all()):
                raise ValueError("earlier columns had padding: pass the whole attention_mask again")
            self._mask_BC = None
            return None
        check_mask(mask_BC, columns)
        earlier_BC = mask_BC[:, : self._columns]
        same = (
            bool(earlier_BC.all())
            if self._mask_BC is None
            else torch.equal(earlier_BC, self._mask_BC)
        )
        if not same:
            raise UnsupportedFeatureError(
                "attention_mask hides or shows tokens that were sent before: roll the session back"
            )
        self._mask_BC = mask_BC
        return mask_BC[:, self._columns :]
