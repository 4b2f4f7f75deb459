"""Generation of one job: prefill of the prompt, then decode steps of all choices together.

N choices, T packed tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from nesa_node.api.generation.grammar import GrammarCompiler, GrammarMatcher
from nesa_node.api.generation.job import (
    Delta,
    FinishReason,
    GenerationEvent,
    Job,
    PrefillDone,
    SequenceToken,
    SessionEnd,
)
from nesa_node.api.generation.sampler import (
    Draw,
    Sampler,
    SharedLogitsState,
    tokens_with_logprobs,
)
from nesa_node.api.generation.tokenization import (
    REPLACEMENT,
    DetokenizerRules,
    IncrementalDetokenizer,
    StopTextFilter,
    TokenBytes,
)
from nesa_node.client.model.activity import RunningSession
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.inference_session import InferenceSession
from nesa_node.client.model.loop_thread import Interrupt
from nesa_node.client.speculation.speculator import Speculator
from nesa_node.core.errors import ContextLengthError


class Vocabulary:
    """Detokenizer rules, token bytes, grammars and end tokens of a model. Thread-safe."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        generation_config: GenerationConfig,
        *,
        vocab_size: int,
    ) -> None:
        """`vocab_size` is the model's: the tokenizer may have fewer tokens."""
        self.eos_ids = frozenset(_eos_ids(tokenizer, generation_config))
        """Tokens that end an answer, according to the model's files."""
        self.detokenizer_rules = DetokenizerRules(tokenizer)
        self.token_bytes = TokenBytes(tokenizer)
        self.grammars = GrammarCompiler(tokenizer, vocab_size, sorted(self.eos_ids))


def _eos_ids(tokenizer: Any, config: GenerationConfig) -> Iterable[int]:
    # Chat models often end a turn with a token that only one of the two files lists.
    for ids in (config.eos_token_id, tokenizer.eos_token_id):
        for one in ids if isinstance(ids, Sequence) else (ids,):
            if isinstance(one, int) and not isinstance(one, bool):
                yield one


class ChoiceDecoder:
    """Samples the tokens of one choice and turns them into deltas, until it `is_done`."""

    def __init__(
        self,
        job: Job,
        index: int,
        vocabulary: Vocabulary,
        matcher: GrammarMatcher | None,
        shared: SharedLogitsState,
    ) -> None:
        self.index = index
        self.is_done = False
        self.last_token = -1
        """Last generated token, the next input of the model."""
        self._max_tokens = job.max_tokens
        self._token_count = 0
        self._eos_ids = frozenset[int]() if job.ignore_eos else vocabulary.eos_ids
        self._sampler = Sampler(shared, index)
        self._text = IncrementalDetokenizer(vocabulary.detokenizer_rules)
        self._stops = StopTextFilter(job.stop)
        self._matcher = matcher

    @property
    def tokens_left(self) -> int:
        """Most tokens that may follow."""
        return self._max_tokens - self._token_count

    @property
    def is_argmax(self) -> bool:
        """Whether each token is the argmax of the logits, without adjustments or grammar."""
        return self._matcher is None and self._sampler.is_argmax

    def choose(self, logits_V: Tensor) -> int:
        """Sample a token, to be appended, from float32 logits, which are not modified."""
        return self._sampler.choose(logits_V, self._allowed_mask(logits_V))

    def draw(self, logits_V: Tensor) -> Draw:
        """As `choose`, for an answer that goes on with a token given to `force_token`."""
        return self._sampler.draw(logits_V, self._allowed_mask(logits_V))

    def force_token(self, token: SequenceToken) -> Delta:
        """As `append_token`, for a token that need not be the one that was drawn."""
        self._sampler.append_token(token.token_id)
        return self.append_token(token)

    def _allowed_mask(self, logits_V: Tensor) -> Tensor | None:
        if self._matcher is None:
            return None
        return self._matcher.allowed_mask(len(logits_V), logits_V.device)

    def append_token(self, chosen: SequenceToken) -> Delta:
        self.last_token = chosen.token_id
        self._token_count += 1
        reason, text = self._finish_reason(), ""
        if self.last_token not in self._eos_ids:
            text = self._stops.append(self._text.append(self.last_token))
        if reason is not None and not self._stops.has_stopped:
            rest = self._text.finish()
            # The limit may have cut a character: its replacement is not sent.
            text += self._stops.append(rest.rstrip(REPLACEMENT) if reason == "length" else rest)
        if self._stops.has_stopped:
            reason = "stop"
        elif reason is not None:
            text += self._stops.finish()
        self.is_done = reason is not None
        return Delta(index=self.index, text=text, tokens=(chosen,), finish_reason=reason)

    def _finish_reason(self) -> FinishReason | None:
        """Finish reason by the last token alone, without stop texts; None if the choice goes on."""
        is_complete = self._matcher is not None and self._matcher.accept_token(self.last_token)
        if self.last_token in self._eos_ids or is_complete:
            return "stop"
        return "length" if self._token_count == self._max_tokens else None


@contextmanager
def open_choices(job: Job, vocabulary: Vocabulary) -> Iterator[list[ChoiceDecoder]]:
    """Decoders of a job's choices; none if it asks for no tokens.

    Raises `ValueError` for a grammar that cannot be followed, and `HttpProblem` if too many
    grammars are in use.
    """
    if not job.max_tokens:
        yield []
        return
    common = SharedLogitsState(job.sampling, job.prompt)
    if job.grammar is None:
        yield [ChoiceDecoder(job, index, vocabulary, None, common) for index in range(job.n)]
    else:
        with vocabulary.grammars.open_matchers(job.grammar, job.n) as followers:
            yield [
                ChoiceDecoder(job, index, vocabulary, follower, common)
                for index, follower in enumerate(followers)
            ]


MAX_PROMPT_CHUNK_TOKENS = 512
"""Limit on the tokens of a prefill step with log probabilities: all its outputs come back."""
MAX_HEAD_TOKENS = 64
"""Limit on the tokens of which logits are in memory at once during prefill."""
_NO_TOKENS = torch.empty(0, dtype=torch.int64)

Emit = Callable[[Sequence[GenerationEvent]], None]


class Generation:
    """Session with a row for each choice; all share the prompt, and rows end one by one."""

    def __init__(
        self,
        model: DistributedModelForCausalLM,
        vocabulary: Vocabulary,
        job: Job,
        *,
        running: RunningSession,
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
        cannot be followed, `HttpProblem` if too many grammars are in use, and
        `concurrent.futures.CancelledError` once interrupted.
        """
        job = self._job
        self._check_length()
        rows = job.n if job.max_tokens else 1
        # The last token is never an input.
        length = len(job.prompt) + max(job.max_tokens - 1, 0)
        known = None if job.prompt_logprobs else [job.prompt, *[()] * (rows - 1)]
        with (
            open_choices(job, self._vocabulary) as choices,
            self._model.inference_session(
                length,
                rows,
                prompt=known,
                prefix_scope=job.prefix_scope,
                adapter=job.adapter,
                interrupt=self._interrupt,
            ) as session,
        ):
            self._running.mark_opened(session)
            hidden_1D, read = self._read_prompt(session)
            self._running.mark_prompt_read()
            self._emit([read])
            if not choices:
                self._emit([Delta(index=i, finish_reason="length") for i in range(job.n)])
            else:
                if rows > 1:
                    session.reorder([0] * rows)
                self._decode(session, choices, hidden_1D)
        audits = session.drawn_audits
        self._emit([SessionEnd(hops=audits.hops, drawn=audits.drawn)])

    def _check_length(self) -> None:
        job, longest = self._job, self._model.context_length
        if not job.prompt:
            raise ValueError("the prompt has no tokens")
        if len(job.prompt) + job.max_tokens > longest:
            raise ContextLengthError(
                f"the prompt has {len(job.prompt)} tokens and {job.max_tokens} were asked for; "
                f"the model holds {longest} together"
            )

    def _read_prompt(self, session: InferenceSession) -> tuple[Tensor, PrefillDone]:
        """Prefill the first row; return the last hidden state [1, D] and the event."""
        held = session.lengths[0]
        others = [_NO_TOKENS] * (session.rows - 1)
        ids_T = torch.tensor(self._job.prompt[held:])
        if not self._job.prompt_logprobs:
            hidden_1D = session.feed([ids_T, *others], want="last")
            return hidden_1D, PrefillDone(cached_tokens=held)
        first = self._job.prompt[0]
        tokens = [SequenceToken(first, self._vocabulary.token_bytes(first), 0.0)]
        hidden_TD = torch.empty(0)
        for piece_T in torch.split(ids_T, MAX_PROMPT_CHUNK_TOKENS):
            for hidden_TD in torch.split(session.feed([piece_T, *others]), MAX_HEAD_TOKENS):
                following = self._job.prompt[len(tokens) : len(tokens) + len(hidden_TD)]
                logits_TV = self._logits(session, hidden_TD)
                tokens += self._tokens_with_logprobs(logits_TV[: len(following)], following)
                del logits_TV  # frees memory before the next step
        return hidden_TD[-1:].clone(), PrefillDone(tokens=tuple(tokens))

    def _decode(
        self, session: InferenceSession, choices: Sequence[ChoiceDecoder], hidden_ND: Tensor
    ) -> None:
        """Decode all choices; `hidden_ND` gives their first tokens: one row for all or one each."""
        drafting, prompts = self._model.drafting, [self._job.prompt] * len(choices)
        if drafting is None:
            return self._decode_rows(session, choices, hidden_ND, None)
        with drafting.speculate(session.session_id, prompts) as speculator:
            self._decode_rows(session, choices, hidden_ND, speculator)

    def _decode_rows(
        self,
        session: InferenceSession,
        choices: Sequence[ChoiceDecoder],
        hidden_ND: Tensor,
        speculator: Speculator | None,
    ) -> None:
        alive = list(choices)
        events = self._step(session, alive, hidden_ND)
        self._record_tokens(speculator, alive, events)
        while True:
            self._emit(events)
            self._running.add_tokens(len(events))
            alive = [choice for choice in alive if not choice.is_done]
            if not alive:
                return
            drafts: list[list[int]] = []
            if speculator is not None:
                speculator.begin_step(len(alive))
                drafts = [
                    speculator.draft(choice.index, choice.tokens_left - 1) for choice in alive
                ]
            began, has_drafts = time.perf_counter(), any(drafts)
            row_ids = [_NO_TOKENS] * len(choices)
            for place, choice in enumerate(alive):
                draft = drafts[place] if has_drafts else ()
                row_ids[choice.index] = torch.tensor((choice.last_token, *draft))
            hidden_TD = session.feed(row_ids, want="all" if has_drafts else "last")
            if has_drafts and speculator is not None:
                events = self._verify(session, speculator, alive, drafts, hidden_TD)
            else:
                events = self._step(session, alive, hidden_TD)
                self._record_tokens(speculator, alive, events)
            if speculator is not None:
                seconds, sent = time.perf_counter() - began, sum(map(len, row_ids))
                speculator.end_step(sent, len(events), seconds, session.num_decoding)

    @staticmethod
    def _record_tokens(
        speculator: Speculator | None, alive: Sequence[ChoiceDecoder], events: Sequence[Delta]
    ) -> None:
        """Record one token of each unfinished choice, for which nothing was drafted."""
        if speculator is not None:
            for choice, event in zip(alive, events, strict=True):
                speculator.record(choice.index, (), [token.token_id for token in event.tokens])

    def _verify(
        self,
        session: InferenceSession,
        speculator: Speculator,
        alive: Sequence[ChoiceDecoder],
        drafts: Sequence[Sequence[int]],
        hidden_TD: Tensor,
    ) -> list[Delta]:
        """Sample each choice's tokens as long as its draft agrees, and one more.

        Rolls back what the session holds beyond them.
        """
        logits_TV = self._logits(session, hidden_TD)
        events: list[Delta] = []
        lengths, start = list(session.lengths), 0
        for choice, draft in zip(alive, drafts, strict=True):
            tokens: list[int] = []
            for logits_1V in torch.split(logits_TV[start : start + len(draft) + 1], 1):
                event = self._step_choice(choice, logits_1V)
                events.append(event)
                tokens.append(choice.last_token)
                agrees = len(tokens) <= len(draft) and tokens[-1] == draft[len(tokens) - 1]
                if choice.is_done or not agrees:
                    break
            start += len(draft) + 1
            lengths[choice.index] -= len(draft) + 1 - len(tokens)
            speculator.record(choice.index, draft, tokens)
        session.rollback(lengths)
        return events

    def _step_choice(self, choice: ChoiceDecoder, logits_1V: Tensor) -> Delta:
        """Sample the next token of one choice."""
        token_id = int(logits_1V.argmax()) if choice.is_argmax else choice.choose(logits_1V[0])
        if self._job.top_logprobs is None:
            return choice.append_token(SequenceToken(token_id, b"", 0.0))
        return choice.append_token(self._tokens_with_logprobs(logits_1V, [token_id])[0])

    def _step(
        self, session: InferenceSession, alive: Sequence[ChoiceDecoder], hidden_ND: Tensor
    ) -> list[Delta]:
        """Sample the next token of each unfinished choice."""
        # Not kept beyond this call: they may be views of a batch of many jobs' logits, which would
        # stay in memory while nodes compute the next tokens.
        logits_NV = self._logits(session, hidden_ND).expand(len(alive), -1)
        if all(choice.is_argmax for choice in alive):
            token_ids = logits_NV.argmax(-1).tolist()
        else:
            token_ids = [
                choice.choose(logits_V) for choice, logits_V in zip(alive, logits_NV, strict=True)
            ]
        if self._job.top_logprobs is None:
            chosen = [SequenceToken(token_id, b"", 0.0) for token_id in token_ids]
        else:
            chosen = self._tokens_with_logprobs(logits_NV, token_ids)
        return [choice.append_token(token) for choice, token in zip(alive, chosen, strict=True)]

    def _tokens_with_logprobs(
        self, logits_TV: Tensor, token_ids: Sequence[int]
    ) -> list[SequenceToken]:
        top, data = self._job.top_logprobs or 0, self._vocabulary.token_bytes
        return tokens_with_logprobs(logits_TV, token_ids, top, data) if token_ids else []

    @staticmethod
    def _logits(session: InferenceSession, hidden_TD: Tensor) -> Tensor:
        """Logits [T, V] as float32, as transformers samples from."""
        return session.ends.head(hidden_TD).float()
