"""transformers' sampling loop with several tokens a step: drafts are verified in one step.

B rows, L columns, T packed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as processing
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from nesa_node.client.model.inference_session import InferenceSession, StopCondition
from nesa_node.client.speculation.speculator import Speculator

_ROWWISE_PROCESSORS = frozenset(
    {
        processing.MinLengthLogitsProcessor,
        processing.MinNewTokensLengthLogitsProcessor,
        processing.TemperatureLogitsWarper,
        processing.RepetitionPenaltyLogitsProcessor,
        processing.TopKLogitsWarper,
        processing.TopPLogitsWarper,
        processing.MinPLogitsWarper,
        processing.TypicalLogitsWarper,
        processing.EpsilonLogitsWarper,
        processing.EtaLogitsWarper,
        processing.NoRepeatNGramLogitsProcessor,
        processing.NoBadWordsLogitsProcessor,
        processing.SuppressTokensLogitsProcessor,
        processing.SequenceBiasLogitsProcessor,
        processing.ForcedEOSTokenLogitsProcessor,
        processing.InfNanRemoveLogitsProcessor,
    }
)
"""Processors that treat each row alone, whatever rows stand beside it."""


def may_speculate(
    config: GenerationConfig,
    processors: Iterable[LogitsProcessor],
    criteria: Iterable[StoppingCriteria],
    rows: int,
) -> bool:
    """Whether these options of `generate` allow steps of several tokens.

    A single row goes through processors and criteria token by token, as without drafts. Rows of a
    batch advance at their own pace: only processors and criteria that are known to look at one row
    at a time are applied to each alone.
    """
    if config.return_dict_in_generate or config.is_assistant:
        return False
    if not any(type(one) is MaxLengthCriteria for one in criteria):
        return False
    if rows == 1:
        return True
    known = (MaxLengthCriteria, EosTokenCriteria)
    return all(type(one) in _ROWWISE_PROCESSORS for one in processors) and all(
        type(one) in known for one in criteria
    )


@dataclass(slots=True, eq=False)
class _TextRow:
    """One row of the batch, padding of its prompt included."""

    ids_1L: torch.Tensor
    is_done: bool = False

    @property
    def last_token(self) -> int:
        return int(self.ids_1L[0, -1])


class SpeculativeDecoding:
    """Decodes the rows of a session after their prompts, as transformers' `_sample` does."""

    def __init__(
        self,
        session: InferenceSession,
        speculator: Speculator,
        config: GenerationConfig,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        *,
        greedy_stop: StopCondition | None,
        streamer: Any = None,
    ) -> None:
        """`greedy_stop` is the stop condition of plain greedy search of one row, if it is that."""
        self._session = session
        self._speculator = speculator
        self._do_sample = bool(config.do_sample)
        self._pad_token = _pad_token(config)
        # transformers types their ids more narrowly than it passes them.
        self._processors: Any = processors
        self._criteria: Any = criteria
        self._most_columns = min(
            one.max_length for one in criteria if type(one) is MaxLengthCriteria
        )
        self._greedy_stop = greedy_stop
        self._streamer = streamer
        self._rows: list[_TextRow] = []
        self._prompt_columns = 0

    @torch.no_grad()
    def run(self, ids_BL: torch.Tensor, prompt: Sequence[torch.Tensor]) -> torch.Tensor:
        """Prompt and new tokens [B, L], shorter rows padded at the end.

        `prompt` has each row's ids [L] that the session lacks.
        """
        self._prompt_columns = ids_BL.shape[1]
        self._rows = [_TextRow(ids_BL[row : row + 1]) for row in range(len(ids_BL))]
        hidden_BD = self._session.feed(prompt, "last")
        self._verify(hidden_BD, [[] for _ in self._rows])
        while not all(row.is_done for row in self._rows):
            if not self._decode_without_drafts():
                self._step()
        if self._streamer is not None:
            self._streamer.end()
        return self._join_rows()

    def _step(self) -> None:
        """Draft, run the drafts through the blocks in one step, and take what is right of them."""
        speculator, session = self._speculator, self._session
        alive = [at for at, row in enumerate(self._rows) if not row.is_done]
        speculator.begin_step(len(alive))
        drafts: list[list[int]] = [[] for _ in self._rows]
        for at in alive:
            room = self._most_columns - self._rows[at].ids_1L.shape[1] - 1
            drafts[at] = speculator.draft(at, room)
        device = session.ends.device
        row_ids = [torch.empty(0, dtype=torch.int64, device=device)] * len(self._rows)
        for at in alive:
            row_ids[at] = torch.tensor([self._rows[at].last_token, *drafts[at]], device=device)
        began = perf_counter()
        hidden_TD = session.feed(row_ids)
        generated = self._verify(hidden_TD, drafts)
        sent = sum(map(len, row_ids))
        seconds = perf_counter() - began
        speculator.end_step(sent, generated, seconds, session.num_decoding)

    def _verify(self, hidden_TD: torch.Tensor, drafts: Sequence[Sequence[int]]) -> int:
        """Append the model's own tokens to each row, as far as drafts agree with them, and one.

        Rolls back what the session holds beyond them; returns how many were appended.
        """
        session, total, start = self._session, 0, 0
        logits_TV = session.ends.head(hidden_TD)
        lengths = list(session.lengths)
        for at, (row, draft) in enumerate(zip(self._rows, drafts, strict=True)):
            if row.is_done:
                continue
            tokens = self._take_tokens(row, logits_TV[start : start + len(draft) + 1], draft)
            start += len(draft) + 1
            # The last token has not been fed.
            lengths[at] -= len(draft) + 1 - len(tokens)
            self._speculator.record(at, draft, tokens)
            total += len(tokens)
        session.rollback(lengths)
        return total

    def _take_tokens(
        self, row: _TextRow, logits_LV: torch.Tensor, draft: Sequence[int]
    ) -> list[int]:
        """The model's tokens by the logits after the row's last token and each of its draft."""
        tokens: list[int] = []
        device = row.ids_1L.device
        while not row.is_done:
            # A copy in float32 on the ids' device, as transformers makes one.
            logits_1V = logits_LV[len(tokens) : len(tokens) + 1].to(
                copy=True, dtype=torch.float32, device=device
            )
            scores_1V = self._processors(row.ids_1L, logits_1V)
            if self._do_sample:
                weights_1V = torch.nn.functional.softmax(scores_1V, dim=-1)
                chosen_1 = torch.multinomial(weights_1V, num_samples=1).squeeze(1)
            else:
                chosen_1 = torch.argmax(scores_1V, dim=-1)
            row.ids_1L = torch.cat([row.ids_1L, chosen_1[:, None]], dim=-1)
            if self._streamer is not None:
                self._streamer.put(chosen_1.cpu())
            # transformers' criteria get the scores of each step, which it has not been asked for.
            row.is_done = bool(self._criteria(row.ids_1L, None).all())
            tokens.append(int(chosen_1))
            if len(tokens) > len(draft) or tokens[-1] != draft[len(tokens) - 1]:
                break
        return tokens

    def _decode_without_drafts(self) -> bool:
        """Decode some greedy tokens of a single row on the event loop, where no drafts would pay.

        Returns whether it did: that takes less time for each token.
        """
        if self._greedy_stop is None or not (count := self._speculator.pause_tokens()):
            return False
        row = self._rows[0]
        done = row.ids_1L.shape[1] - self._prompt_columns
        count = min(count, self._greedy_stop.max_tokens - done)
        stop = StopCondition(count, self._greedy_stop.min_tokens - done, self._greedy_stop.stop_ids)
        tokens: list[int] = []
        began = perf_counter()
        following = self._session.generate_greedy(row.ids_1L[0, -1:], stop)
        with closing(following):
            for token in following:
                tokens.append(token)
                if self._streamer is not None:
                    self._streamer.put(torch.tensor([token]))
        seconds = perf_counter() - began
        row.ids_1L = torch.cat([row.ids_1L, row.ids_1L.new_tensor([tokens])], dim=-1)
        row.is_done = self._greedy_stop.is_last(tokens[-1], done + len(tokens) - 1)
        self._speculator.record_plain(0, tokens, seconds, self._session.num_decoding)
        return True

    def _join_rows(self) -> torch.Tensor:
        columns = max(row.ids_1L.shape[1] for row in self._rows)
        return torch.cat(
            [
                torch.nn.functional.pad(
                    row.ids_1L, (0, columns - row.ids_1L.shape[1]), value=self._pad_token
                )
                for row in self._rows
            ]
        )


def _pad_token(config: GenerationConfig) -> int:
    """What transformers fills finished rows with."""
    prepared = getattr(config, "_pad_token_tensor", None)
    return 0 if prepared is None else int(prepared)
