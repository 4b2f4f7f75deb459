"""A small causal model in this process that drafts tokens for a large one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.inference_session import InferenceSession
from nesa_node.client.speculation.drafting import Drafting
from nesa_node.client.speculation.drafts import (
    CONFIDENCE_LEVELS,
    DraftKind,
    DraftSource,
    DraftToken,
)
from nesa_node.core.decision_log import DecisionLog
from nesa_node.core.errors import ConfigError, ModelNotFoundError
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id

MAX_DRAFT_CONTEXT_TOKENS = 4096
"""Longest text that a draft model goes on with: its cache is in this process."""


class ModelDrafter:
    """Greedy tokens of a small model, with the probability that it gives them."""

    source: DraftSource = "model"

    def __init__(self, model: DistributedModelForCausalLM) -> None:
        """`model` has all of its blocks in this process; its owner closes it."""
        self._model = model
        self._text: list[int] = []
        self._session: InferenceSession | None = None
        self._max_tokens = min(model.context_length, MAX_DRAFT_CONTEXT_TOKENS)

    def append(self, tokens: Sequence[int]) -> None:
        self._text += tokens

    @torch.no_grad()
    def draft(self) -> Iterator[DraftToken]:
        """None where the text is longer than the model, or `MAX_DRAFT_CONTEXT_TOKENS`, allows."""
        if not 0 < len(self._text) < self._max_tokens:
            return
        if self._session is None:
            self._session = self._model.inference_session(self._max_tokens)
        session = self._session
        (held,) = session.keep_common_prefix([self._text[:-1]])
        tokens = self._text[held:]
        while session.position + len(tokens) <= self._max_tokens:
            hidden_1D = session.feed([torch.tensor(tokens)], want="last")
            logits_V = session.ends.head(hidden_1D)[0].float()
            best = int(logits_V.argmax())
            chance = math.exp(float(logits_V[best] - logits_V.logsumexp(0)))
            level = min(int(chance * CONFIDENCE_LEVELS), CONFIDENCE_LEVELS - 1)
            yield best, DraftKind("model", level)
            tokens = [best]

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None


def open_drafting(
    draft: str,
    checkpoint: Checkpoint,
    open_draft: Callable[[str], Checkpoint],
    build: Callable[[Checkpoint], DistributedModelForCausalLM],
    *,
    private: str = "none",
    decisions_path: Path | None = None,
) -> Drafting | None:
    """What drafts for the sessions of a model by the setting `draft`; None: nothing does.

    `open_draft` opens the checkpoint of a draft model, and `build` makes a model of it with all of
    its blocks in this process. Raises what they raise, and `ConfigError` for a model with another
    vocabulary and for drafts in private sessions.
    """
    if draft == "off" or (draft == "auto" and private != "none"):
        return None
    if private != "none":
        raise ConfigError(
            f"draft={draft} with private={private}: rejected drafts would be sent as well, which "
            "takes time or tells more; leave one of them out"
        )
    model_id = compute_model_id(checkpoint)
    decisions = None if decisions_path is None else DecisionLog(decisions_path)
    if draft == "auto":
        beside = checkpoint.folder / "draft"
        draft = str(beside) if (beside / "config.json").is_file() else "lookup"
    if draft == "lookup":
        return Drafting(model_id, decisions=decisions)
    try:
        small = open_draft(draft)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"draft={draft} (or lookup, auto, off): {error}") from error
    _check_vocabulary(checkpoint, small)
    model = build(small)
    return Drafting(
        model_id,
        new_model_drafter=partial(ModelDrafter, model),
        close_model=model.close,
        decisions=decisions,
    )


def _check_vocabulary(model: Checkpoint, draft: Checkpoint) -> None:
    """Raise `ConfigError` unless both models have one vocabulary, by size and by tokenizer."""
    sizes = [one.config.vocab_size for one in (model, draft)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{draft.name} cannot draft for {model.name}: its vocabulary has {sizes[1]} tokens, "
            f"not {sizes[0]}"
        )
    vocabularies = [_read_vocabulary(one.fetch_side_files()) for one in (model, draft)]
    if None not in vocabularies and vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"{draft.name} cannot draft for {model.name}: its tokenizer numbers tokens otherwise"
        )


def _read_vocabulary(folder: Path) -> Any:
    """Tokens and their ids by `tokenizer.json`; None without one."""
    try:
        with closing((folder / "tokenizer.json").open(encoding="utf-8")) as file:
            told: Any = json.load(file)
        return told["model"]["vocab"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
