"""Inference session for synchronous callers: token ids in, logits out.

B rows, L columns, T packed tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch

from nesa_node.client.model.head import EmbeddingAndHead
from nesa_node.client.model.layers import pack
from nesa_node.client.model.loop_thread import HeldContext, Interrupt, LoopChannel, LoopThread
from nesa_node.client.session.base import (
    UNKNOWN_TOKEN,
    BlockSession,
    DrawnAudits,
    Failover,
    RowSlice,
    SessionPrefix,
    Want,
)
from nesa_node.core.errors import ContextLengthError
from nesa_node.routing.chains import Hop

T = TypeVar("T")

MIN_COPIED_TOKENS = 32
"""Fewest new tokens for which an identical row is copied instead of computed; a copy costs a round
trip."""


@dataclass(frozen=True, slots=True)
class StopCondition:
    """Stop condition of greedy decoding: after `max_tokens` tokens, or at one of `stop_ids`, which
    are banned from the first `min_tokens` tokens.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()

    def banned_ids(self, index: int) -> frozenset[int]:
        """Ids that generated token `index`, counted from 0, must not have."""
        return self.stop_ids if index < self.min_tokens else frozenset()

    def is_last(self, token: int, index: int) -> bool:
        """Whether `token`, generated token `index` counted from 0, is the last."""
        return index + 1 >= self.max_tokens or token in self.stop_ids


class InferenceSession:
    """KV caches of `rows` sequences in the swarm, with their token ids.

    Made by `model.inference_session(...)`; use it as a context manager, from one thread at a time.
    A step that fails or is interrupted closes the session; an `Interrupt` closes it from other
    threads.
    """

    def __init__(
        self,
        ends: EmbeddingAndHead,
        loop: LoopThread,
        held: HeldContext[BlockSession],
        prefix: SessionPrefix | None = None,
        interrupt: Interrupt | None = None,
    ) -> None:
        """`prefix` is that of the open session: rows may already hold some of its tokens."""
        self.ends = ends
        """Embedding and head of the model that opened the session."""
        self._loop = loop
        self._held_context = held
        self._blocks = held.value
        self.max_length = self._blocks.max_tokens
        """Tokens per row that every hop has reserved."""
        self._prefix = prefix
        self._interrupt = interrupt
        self._tokens: list[list[int]] = [
            list(prefix.tokens[row][:length]) if prefix is not None else []
            for row, length in enumerate(self._blocks.lengths)
        ]
        self.closed = False
        self.tokens_sent = 0
        """Tokens sent through the blocks so far, all rows together."""

    @property
    def rows(self) -> int:
        return len(self._tokens)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each row holds, including those reused from nodes' prefix caches."""
        return tuple(len(row) for row in self._tokens)

    @property
    def position(self) -> int:
        """Tokens that the longest row holds."""
        return max(self.lengths)

    @property
    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        """Token ids that each row holds; -1 stands for input given as a hidden state."""
        return tuple(tuple(row) for row in self._tokens)

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Current nodes and their spans."""
        return self._blocks.hops

    @property
    def codecs(self) -> tuple[str, ...]:
        """Codec of the last step's hidden states on each stream: client, nodes, client."""
        return self._blocks.codecs

    @property
    def failovers(self) -> tuple[Failover, ...]:
        """The last replacements of nodes; readable from any thread."""
        return self._blocks.failovers

    @property
    def session_id(self) -> bytes:
        """Id by which decisions about the session are logged; empty where none are."""
        return self._blocks.session_id

    @property
    def num_decoding(self) -> int:
        """Most sessions that decoded at a node of the last step, this one included; 0: unknown."""
        return self._blocks.num_decoding

    @property
    def drawn_audits(self) -> DrawnAudits:
        """What is audited of the closed session; before it is closed, nothing is told."""
        return self._blocks.drawn_audits

    @property
    def spent_epsilon(self) -> float | None:
        """With `private="noise:..."`, epsilon of all hidden states that were sent, composed.

        Of this session alone: another one with the same text draws fresh noise, which adds to it.
        """
        sent = self._blocks.noisy_vectors
        return None if sent is None else sent.epsilon

    @torch.no_grad()
    def step(
        self, inputs: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Append ids [B, L] or [L], which give logits [B, L, V], or hidden states [B, L, D].

        Hidden states enter before the first block and are returned after the last one, [B, L, D],
        without norm and head. `attention_mask` [B, L] covers these new columns only: 0 marks
        padding, which is not sent and has zeros as results. Raises `ContextLengthError` beyond
        `max_length`, before anything is sent.
        """
        if inputs.is_floating_point():
            return self._step_hidden(inputs, attention_mask)
        ids_BL = inputs.unsqueeze(0) if inputs.ndim == 1 else inputs
        self.check_batch(ids_BL)
        batch = pack(ids_BL.to(self.ends.device), attention_mask)
        hidden_TD = self.feed(batch.row_ids)
        return batch.logits(hidden_TD, "all", 0, self.ends.head)

    def feed(self, row_ids: Sequence[torch.Tensor], want: Want = "all") -> torch.Tensor:
        """Append each row's ids [L] (int64, may be empty); return hidden [T, D] after the blocks.

        Rows with equal tokens from the start on, such as samples of one prompt, are computed once.
        """
        new_tokens = [ids_L.tolist() for ids_L in row_ids]
        twins = self._first_equal_rows(new_tokens)
        firsts = [ids_L if twins[row] == row else ids_L[:0] for row, ids_L in enumerate(row_ids)]
        hidden_TD = self.ends.embed(firsts, self.lengths)
        sent = [tokens if twins[row] == row else [] for row, tokens in enumerate(new_tokens)]
        result_TD = self._run_step(hidden_TD, sent, want)
        if all(twin == row for row, twin in enumerate(twins)):
            return result_TD
        self.reorder(twins)
        counts = [min(len(tokens), 1) if want == "last" else len(tokens) for tokens in sent]
        parts = torch.split(result_TD, counts)
        return torch.cat([parts[twin] for twin in twins])

    def generate_greedy(self, ids_L: torch.Tensor, stop: StopCondition) -> Generator[int]:
        """Append ids [L] (int64) to the only row; yield greedy tokens, appending all but the last.

        One or two tokens may be computed ahead of the caller; closing the generator rolls them
        back. Raises as `step` does.
        """
        if self.rows != 1:
            raise ValueError(f"the session has {self.rows} rows: greedy() continues one")
        self._check_open()
        self._check_capacity([RowSlice(0, self.position, len(ids_L) + stop.max_tokens - 1)])
        held = self.position + len(ids_L) - 1
        hidden_LD = self.ends.embed([ids_L], self.lengths)

        def work(telling: LoopChannel[int]) -> Coroutine[Any, Any, None]:
            return self._decode_greedy(hidden_LD, ids_L.tolist(), stop, telling)

        try:
            with closing(self._loop.stream(work, interrupt=self._interrupt)) as following:
                for token in following:
                    held += 1
                    yield token
        except GeneratorExit:
            self.rollback([held])
            raise
        except BaseException:
            self._release()
            raise

    async def _decode_greedy(
        self,
        hidden_LD: torch.Tensor,
        new_tokens: list[int],
        stop: StopCondition,
        channel: LoopChannel[int],
    ) -> None:
        """Decode on the event loop until the stop condition, or until the reader has left."""
        loop = asyncio.get_running_loop()
        for number in range(stop.max_tokens):
            part = RowSlice(0, self.position, len(new_tokens))
            output_1D = await self._blocks.step(hidden_LD, [part], want="last")
            self._tokens[0].extend(new_tokens)
            self.tokens_sent += len(new_tokens)
            place = self.position if number + 1 < stop.max_tokens else None
            chosen = await self.ends.head.choose_next(output_1D, place, stop.banned_ids(number))
            # Deferred until other sessions' steps are sent: waking the reading thread would delay
            # them.
            loop.call_soon(channel.send, chosen.token)
            if chosen.hidden_1D is None or stop.is_last(chosen.token, number):
                return
            await channel.wait_for_reader()
            if channel.is_abandoned:
                return
            hidden_LD, new_tokens = chosen.hidden_1D, [chosen.token]

    def rollback(self, lengths: Sequence[int]) -> None:
        """Remove each row's tokens beyond `lengths[row]`."""
        if len(lengths) != self.rows or any(
            not 0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)
        ):
            raise ValueError(f"cannot roll {self.lengths} back to {tuple(lengths)}")
        self._check_open()
        if tuple(lengths) == self.lengths:
            return
        self._run(self._blocks.rollback(lengths))
        for row, length in zip(self._tokens, lengths, strict=True):
            del row[length:]

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row continue as a copy of row `sources[row]`. Nothing is recomputed."""
        if len(sources) != self.rows or not all(0 <= source < self.rows for source in sources):
            raise ValueError(f"{list(sources)} do not name one of {self.rows} rows for each")
        self._check_open()
        if list(sources) == list(range(self.rows)):
            return
        self._run(self._blocks.reorder(sources))
        self._tokens = [list(self._tokens[source]) for source in sources]

    def keep_common_prefix(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """Roll each row back to its common prefix with its text; return the remaining lengths."""
        common = [_common_prefix(row, text) for row, text in zip(self._tokens, texts, strict=True)]
        self.rollback(common)
        return common

    def check_batch(self, ids_BL: torch.Tensor) -> None:
        """Raise `ValueError` unless `ids_BL` is [rows, L]."""
        if ids_BL.ndim != 2 or ids_BL.shape[0] != self.rows:
            raise ValueError(
                f"the session has {self.rows} rows, the input has shape {tuple(ids_BL.shape)}: "
                "open the session with the batch size times num_return_sequences"
            )

    def finish(self) -> None:
        """Close, and wait for audits of the session, if any were drawn, but not for long.

        Leaving the context does so, too. Raises `WrongActivationsError` where an audit fails: what
        the session computed is not to be used.
        """
        if not self.closed:
            self._keep_tokens()
            self._run(self._blocks.finish())
            self._release()

    def close(self) -> None:
        """Release the caches on every hop, which keeps pages for later sessions. Idempotent."""
        if not self.closed:
            self._keep_tokens()
            self._release()

    def _keep_tokens(self) -> None:
        """Tell nodes, on closing, what pages they may keep."""
        if self._prefix is not None:
            self._prefix.final_tokens[:] = self._tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.finish()
        else:
            self.close()

    def _first_equal_rows(self, new_tokens: Sequence[Sequence[int]]) -> list[int]:
        """For each row the first row with equal tokens, or itself if a copy is not worth it."""
        twins = list(range(self.rows))
        if min(map(len, new_tokens)) >= MIN_COPIED_TOKENS:
            seen: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
            for row, tokens in enumerate(new_tokens):
                if UNKNOWN_TOKEN not in self._tokens[row]:
                    twins[row] = seen.setdefault((tuple(self._tokens[row]), tuple(tokens)), row)
        return twins

    def _step_hidden(
        self, hidden_BLD: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        self.check_batch(hidden_BLD[..., 0])
        columns_BL = torch.arange(hidden_BLD.shape[1]).expand(hidden_BLD.shape[:2])
        batch = pack(columns_BL, attention_mask)
        hidden_TD = torch.cat(
            [
                hidden_LD[columns_L]
                for hidden_LD, columns_L in zip(hidden_BLD, batch.row_ids, strict=True)
            ]
        )
        unknown = [[UNKNOWN_TOKEN] * len(columns_L) for columns_L in batch.row_ids]
        output_TD = self._run_step(hidden_TD, unknown, "all")
        return batch.logits(output_TD, "all", 0, lambda hidden: hidden)

    def _run_step(
        self, hidden_TD: torch.Tensor, new_tokens: Sequence[Sequence[int]], want: Want
    ) -> torch.Tensor:
        slices = [
            RowSlice(row, len(self._tokens[row]), len(tokens))
            for row, tokens in enumerate(new_tokens)
            if tokens
        ]
        self._check_open()
        self._check_capacity(slices)
        if not slices:
            return hidden_TD
        result = self._run(self._blocks.step(hidden_TD, slices, want=want))
        for part in slices:
            self._tokens[part.row].extend(new_tokens[part.row])
            self.tokens_sent += part.count
        return result.to(self.ends.device)

    def _release(self) -> None:
        if not self.closed:
            self.closed = True
            self._held_context.release()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._loop.run(work, interrupt=self._interrupt)
        except BaseException:
            # The state of the hops is unknown now.
            self._release()
            raise

    def _check_capacity(self, slices: Sequence[RowSlice]) -> None:
        for part in slices:
            if part.position + part.count > self.max_length:
                raise ContextLengthError(
                    f"row {part.row} would hold {part.position + part.count} tokens, the session "
                    f"was opened for {self.max_length}: open it with a larger max_length"
                )

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("the session is closed: open a new one with model.inference_session()")


def _common_prefix(held: Sequence[int], text: Sequence[int]) -> int:
    for at, (mine, given) in enumerate(zip(held, text, strict=False)):
        if mine != given:
            return at
    return min(len(held), len(text))
