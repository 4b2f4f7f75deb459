"""Generation of one job: prefill of the prompt, then decode steps of all choices together.

N choices, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from nesa_node.api.decoding.adjustments import CommonAdjustments
from nesa_node.api.decoding.choice import Choice
from nesa_node.api.decoding.job import Chosen, Delta, Event, Job, PromptRead
from nesa_node.api.decoding.logprobs import chosen_tokens
from nesa_node.api.decoding.vocabulary import Vocabulary
from nesa_node.client.activity import Running
from nesa_node.client.causal_lm import DistributedModelForCausalLM
from nesa_node.client.inference import InferenceSession
from nesa_node.client.interrupt import Interrupt
from nesa_node.core.errors import ContextLengthError

PIECE_TOKENS = 512
"""Limit on the tokens of a prefill step with log probabilities: all its outputs come back."""
HEAD_TOKENS = 64
"""Limit on the tokens of which logits are in memory at once during prefill."""
_NOTHING = torch.empty(0, dtype=torch.int64)

Emit = Callable[[Sequence[Event]], None]


class Generation:
    """One session with a row for each choice; the prompt is computed once, and finished rows get
    no more steps."""

    def __init__(
        self,
        model: DistributedModelForCausalLM,
        vocabulary: Vocabulary,
        job: Job,
        *,
        running: Running,
        interrupt: Interrupt,
        emit: Emit,
    ) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._job = job
        self._running = running
        self._interrupt = interrupt
        self._emit = emit

    @torch.inference_mode()
    def run(self) -> None:
        """Generate all choices, passing events to `emit` as they come. Blocks.

        Raises `ContextLengthError` and the errors of sessions, `ValueError` for a grammar that
        cannot be followed, `Problem` if too many grammars are in use, and
        `concurrent.futures.CancelledError` once interrupted.
        """
        self._check()
        with self._choices() as choices:
            self._run(choices)

    def _run(self, choices: Sequence[Choice]) -> None:
        job = self._job
        rows = job.n if job.max_tokens else 1
        # The last token is never an input.
        length = len(job.prompt) + max(job.max_tokens - 1, 0)
        known = None if job.prompt_logprobs else [job.prompt, *[()] * (rows - 1)]
        with self._model.inference_session(
            length,
            rows,
            prompt=known,
            prefix_scope=job.prefix_scope,
            interrupt=self._interrupt,
        ) as session:
            self._running.opened(session)
            hidden_1D, read = self._read_prompt(session)
            self._running.read_prompt()
            self._emit([read])
            if not choices:
                ends = [Delta(index=i, finish_reason="length") for i in range(job.n)]
                self._emit(ends)
                return
            if rows > 1:
                session.reorder([0] * rows)
            self._decode(session, choices, hidden_1D)

    def _check(self) -> None:
        job, longest = self._job, self._model.context_length
        if not job.prompt:
            raise ValueError("the prompt has no tokens")
        if len(job.prompt) + job.max_tokens > longest:
            raise ContextLengthError(
                f"the prompt has {len(job.prompt)} tokens and {job.max_tokens} were asked for; "
                f"the model holds {longest} together"
            )

    @contextmanager
    def _choices(self) -> Iterator[list[Choice]]:
        job, vocabulary = self._job, self._vocabulary
        if not job.max_tokens:
            yield []
            return
        common = CommonAdjustments(job.sampling, job.prompt)
        if job.grammar is None:
            yield [Choice(job, index, vocabulary, None, common) for index in range(job.n)]
        else:
            with vocabulary.grammars.followers(job.grammar, job.n) as followers:
                yield [
                    Choice(job, index, vocabulary, follower, common)
                    for index, follower in enumerate(followers)
                ]

    def _read_prompt(self, session: InferenceSession) -> tuple[Tensor, PromptRead]:
        """Prefill the first row; return the last hidden state [1, D] and the event."""
        held = session.lengths[0]
        others = [_NOTHING] * (session.rows - 1)
        ids_T = torch.tensor(self._job.prompt[held:])
        if not self._job.prompt_logprobs:
            hidden_1D = session.feed([ids_T, *others], want="last")
            return hidden_1D, PromptRead(cached_tokens=held)
        first = self._job.prompt[0]
        tokens = [Chosen(first, self._vocabulary.token_bytes(first), 0.0)]
        hidden_TD = torch.empty(0)
        for piece_T in torch.split(ids_T, PIECE_TOKENS):
            for hidden_TD in torch.split(session.feed([piece_T, *others]), HEAD_TOKENS):
                following = self._job.prompt[len(tokens) : len(tokens) + len(hidden_TD)]
                logits_TV = self._logits(session, hidden_TD)
                tokens += self._known(logits_TV[: len(following)], following)
                del logits_TV  # frees memory before the next step
        return hidden_TD[-1:].clone(), PromptRead(tokens=tuple(tokens))

    def _decode(
        self, session: InferenceSession, choices: Sequence[Choice], hidden_ND: Tensor
    ) -> None:
        """Decode all choices; `hidden_ND` gives their first tokens: one row for all or one each."""
        alive = list(choices)
        while True:
            self._emit(self._step(session, alive, hidden_ND))
            self._running.generated(len(alive))
            alive = [choice for choice in alive if not choice.done]
            if not alive:
                return
            row_ids = [_NOTHING] * len(choices)
            for choice in alive:
                row_ids[choice.index] = torch.tensor((choice.last,))
            hidden_ND = session.feed(row_ids, want="last")

    def _step(
        self, session: InferenceSession, alive: Sequence[Choice], hidden_ND: Tensor
    ) -> list[Delta]:
        """Sample the next token of each unfinished choice."""
        # Not kept beyond this call: they may be views of a batch of many jobs' logits, which would
        # stay in memory while nodes compute the next tokens.
        logits_NV = self._logits(session, hidden_ND).expand(len(alive), -1)
        if all(choice.takes_best for choice in alive):
            token_ids = logits_NV.argmax(-1).tolist()
        else:
            token_ids = [
                choice.choose(logits_V) for choice, logits_V in zip(alive, logits_NV, strict=True)
            ]
        if self._job.top_logprobs is None:
            chosen = [self._chosen(token_id) for token_id in token_ids]
        else:
            chosen = self._known(logits_NV, token_ids)
        return [choice.take(token) for choice, token in zip(alive, chosen, strict=True)]

    def _known(self, logits_TV: Tensor, token_ids: Sequence[int]) -> list[Chosen]:
        top, data = self._job.top_logprobs or 0, self._vocabulary.token_bytes
        return chosen_tokens(logits_TV, token_ids, top, data) if token_ids else []

    @staticmethod
    def _chosen(token_id: int) -> Chosen:
        return Chosen(token_id, b"", 0.0)

    @staticmethod
    def _logits(session: InferenceSession, hidden_TD: Tensor) -> Tensor:
        """Logits [T, V] as float32, as transformers samples from."""
        return session.ends.head(hidden_TD).float()
