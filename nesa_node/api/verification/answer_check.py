"""Checks of a saved answer: the model runs over it, and the sampler says what it would have drawn.

The tokens go in as the answer has them (teacher forcing), so that one forward pass computes all of
them, and a difference is found where it is and not in all that follows. It is Token-DiFR ("DiFR:
Inference verification despite nondeterminism", section 3) with this project's sampler.

T tokens of the answer, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from nesa_node.api.endpoints.chat import callable_tools, make_chat_job, tool_call_parser
from nesa_node.api.endpoints.completions import make_completion_jobs
from nesa_node.api.endpoints.responses import make_response_job
from nesa_node.api.gateway import system_fingerprint
from nesa_node.api.generation.decode_loop import (
    MAX_HEAD_TOKENS,
    MAX_PROMPT_CHUNK_TOKENS,
    ChoiceDecoder,
    open_choices,
)
from nesa_node.api.generation.job import Job, SequenceToken
from nesa_node.api.generation.sampler import MIN_SAMPLING_TEMPERATURE
from nesa_node.api.generation.tokenization import REPLACEMENT
from nesa_node.api.models.jobs import JobContext
from nesa_node.api.models.sandbox import GrammarChecker
from nesa_node.api.models.served_model import ServedModel
from nesa_node.api.responses.token_logprobs import MIN_LOGPROB
from nesa_node.api.schemas.chat_request import ChatCompletionRequest
from nesa_node.api.schemas.generation_request import CompletionRequest
from nesa_node.api.schemas.tool_calls import ToolCallParser
from nesa_node.api.verification.claims import Claim, ListedClaim, TextClaim, TokenTable, claim_text
from nesa_node.api.verification.saved_answer import (
    SavedAnswer,
    SavedChoice,
    UncheckableAnswerError,
)
from nesa_node.api.verification.token_gap import DrawGaps
from nesa_node.api.verification.verdict import AnswerReport, ChoiceReport, TokenDifference
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.inference_session import InferenceSession
from nesa_node.core.settings.models import GatewayConfig
from nesa_node.web.problem import HttpProblem

_SPARE_TOKENS = 64
"""Tokens reserved beyond those that a text probably has."""


async def make_jobs(served: ServedModel, answer: SavedAnswer) -> list[Job]:
    """Jobs that a gateway makes of the answer's request. Raises `UncheckableAnswerError`."""
    grammars = GrammarChecker()
    # The limits of the gateway that answered are not known; they only end answers.
    context = JobContext(config=GatewayConfig(), check_grammar=grammars.check)
    request = answer.request
    try:
        if isinstance(request, CompletionRequest):
            request.check_fields()
            return await make_completion_jobs(context, served, request)
        if isinstance(request, ChatCompletionRequest):
            return [await make_chat_job(context, served, request)]
        return [await make_response_job(context, served, request)]
    except HttpProblem as problem:
        raise UncheckableAnswerError(f"the request: {problem.message}") from None
    finally:
        await grammars.close()


class AnswerCheck:
    """Checks answers by `model`, whose blocks may be anywhere. Blocks the thread."""

    def __init__(self, served: ServedModel, model: DistributedModelForCausalLM) -> None:
        self._served = served
        self._model = model
        self._table = TokenTable(served.tokenizer, served.vocabulary, served.vocab_size)

    @torch.inference_mode()
    def check(self, answer: SavedAnswer, jobs: Sequence[Job]) -> AnswerReport:
        """Compare all choices of an answer with what the model gives for `jobs`.

        Raises `UncheckableAnswerError` for an answer that lacks what is needed, and the errors of
        sessions.
        """
        choices_per_job = jobs[0].n
        if max(answer.choices) >= len(jobs) * choices_per_job:
            raise UncheckableAnswerError(
                f"the answer has a choice {max(answer.choices)}, which was not asked for"
            )
        notes = self._notes(answer, len(jobs) * choices_per_job)
        reports: list[ChoiceReport] = []
        for number, job in enumerate(jobs):
            # Decoders stop where the answer says that it was too long.
            unlimited = replace(job, max_tokens=self._model.context_length)
            echo = self._echo(answer, number)
            with open_choices(unlimited, self._served.vocabulary) as decoders:
                for decoder in decoders:
                    index = number * choices_per_job + decoder.index
                    if (saved := answer.choices.get(index)) is None:
                        continue
                    reports.append(
                        _ChoiceCheck(self._table, job, decoder, saved, index).run(
                            self._model, echo, self._parser(answer), notes
                        )
                    )
        if answer.completion_tokens not in (None, sum(report.tokens for report in reports)):
            notes.append(
                f"the answer counts {answer.completion_tokens} tokens, of which "
                f"{sum(report.tokens for report in reports)} are in it"
            )
        if not any(report.tokens or report.problems for report in reports):
            raise UncheckableAnswerError("the answer has no tokens")
        return AnswerReport(reports, list(dict.fromkeys(notes)))

    def _notes(self, answer: SavedAnswer, asked: int) -> list[str]:
        notes = []
        if answer.fingerprint not in (None, system_fingerprint(self._served.model_id)):
            notes.append(
                "by its system_fingerprint the answer is of other weights, or of another version "
                "of nesa-node"
            )
        if len(answer.choices) < asked:
            notes.append(f"{asked} choices were asked for, the answer has {len(answer.choices)}")
        return notes

    def _echo(self, answer: SavedAnswer, job: int) -> str:
        """The prompt, where the answer is to begin with it."""
        request = answer.request
        if not isinstance(request, CompletionRequest) or not request.echo:
            return ""
        prompt = request.prompts()[job]
        return prompt if isinstance(prompt, str) else str(self._served.tokenizer.decode(prompt))

    def _parser(self, answer: SavedAnswer) -> ToolCallParser | None:
        request = answer.request
        if not isinstance(request, ChatCompletionRequest):
            return None
        tools = callable_tools(request)
        return tool_call_parser(self._served, tools)() if tools else None


class _ChoiceCheck:
    """The check of one choice."""

    def __init__(
        self,
        table: TokenTable,
        job: Job,
        decoder: ChoiceDecoder,
        saved: SavedChoice,
        index: int,
    ) -> None:
        self._table = table
        self._job = job
        self._decoder = decoder
        self._saved = saved
        self._report = ChoiceReport(index)
        self._text: list[str] = []
        self._logprob_errors: list[float] = []
        self._is_reproducible = (
            job.sampling.seed is not None or job.sampling.temperature < MIN_SAMPLING_TEMPERATURE
        )

    def run(
        self,
        model: DistributedModelForCausalLM,
        echo: str,
        parser: ToolCallParser | None,
        notes: list[str],
    ) -> ChoiceReport:
        text = self._saved.text
        if not text.startswith(echo):
            self._report.problems.append("it does not begin with the prompt, which it was to echo")
            return self._report
        text = text[len(echo) :]
        listed = self._listed_tokens(echo)
        self._check_requirements(listed is not None, notes)
        if listed is None and model.ends.dtype != torch.float32:
            raise UncheckableAnswerError(
                "it lists no tokens, and where noise changes draws, as in bfloat16, the text does "
                "not tell them: ask for logprobs, which list the tokens"
            )
        claim = listed or self._text_claim(text, notes)
        tokens = self._follow(claim, model)
        if self._logprob_errors:
            self._report.worst_logprob_error = max(self._logprob_errors)
            self._report.mean_logprob_error = fmean(self._logprob_errors)
        if not self._report.problems:
            self._check_end(tokens, text, parser, notes)
        return self._report

    def _listed_tokens(self, echo: str) -> ListedClaim | None:
        saved, job = self._saved, self._job
        if saved.token_ids is not None:
            listed: list[Sequence[int]] = [[token_id] for token_id in saved.token_ids]
            ends = self._table.vocabulary.eos_ids
            has_end = not saved.token_ids or saved.token_ids[-1] in ends
            if saved.finish_reason == "stop" and not (has_end or job.stop or job.grammar):
                listed.append(sorted(ends))
            return ListedClaim(listed)
        if saved.tokens is None:
            return None
        if echo:
            saved.tokens = saved.tokens[len(job.prompt) :]
        return ListedClaim.from_bytes(saved.tokens, self._table)

    def _check_requirements(self, is_listed: bool, notes: list[str]) -> None:
        if self._job.adapter is not None:
            raise UncheckableAnswerError("answers with an adapter cannot be checked")
        if not self._is_reproducible:
            temperature = self._job.sampling.temperature
            if not self._saved.tokens:
                raise UncheckableAnswerError(
                    f"the answer was sampled at temperature {temperature:g} without a seed: which "
                    "tokens were to come cannot be known. Ask with a seed, with temperature 0, or "
                    "with logprobs"
                )
            notes.append(
                f"it was sampled at temperature {temperature:g} without a seed: its log "
                "probabilities are checked, not which tokens were drawn"
            )
        if not is_listed and self._saved.tool_calls:
            raise UncheckableAnswerError(
                "the answer calls tools, and has not the text that its tokens made: ask for "
                "logprobs, which list the tokens"
            )

    def _text_claim(self, text: str, notes: list[str]) -> Claim:
        notes.append("it lists no tokens: they were found by its text")
        job = self._job
        return claim_text(
            text,
            self._table,
            has_stopped=self._saved.finish_reason == "stop",
            stops=job.stop,
            eos_ids=() if job.ignore_eos else self._table.vocabulary.eos_ids,
        )

    def _follow(self, claim: Claim, model: DistributedModelForCausalLM) -> list[int]:
        """Compare token by token; return the tokens that were compared."""
        tokens: list[int] = []
        with _feed(model, self._job.prompt, claim.guess()) as fed:
            while not claim.is_at_end() and not self._decoder.is_done:
                if tokens:
                    fed.require(tokens, claim.guess)
                token_id = self._compare(claim, len(tokens), fed.logits(len(tokens)))
                if token_id is None:
                    return tokens
                tokens.append(token_id)
                claim.advance(token_id)
        if not claim.is_at_end() and not isinstance(claim, TextClaim):
            self._report.problems.append(f"it goes on after token {len(tokens)}, which ends it")
        return tokens

    def _compare(self, claim: Claim, position: int, logits_V: Tensor) -> int | None:
        """The claimed token at a position; None: it cannot be compared."""
        report, decoder = self._report, self._decoder
        try:
            draw = decoder.draw(logits_V)
        except ValueError as error:  # the grammar goes no further
            report.problems.append(f"token {position}: {error}")
            return None
        gaps = DrawGaps(draw, self._job.sampling)
        token_id: int | None
        if not self._is_reproducible:
            token_id = max(claim.candidates(), key=lambda one: float(logits_V[one]), default=None)
        elif claim.accepts(draw.token_id):
            token_id = draw.token_id
        else:
            token_id = min(claim.candidates(), key=gaps.gap, default=None)
        if token_id is None:
            report.problems.append(f"token {position} is none of the model's")
            return None
        report.tokens += 1
        self._compare_logprob(position, token_id, logits_V)
        if self._is_reproducible and token_id != draw.token_id:
            gap = gaps.gap(token_id)
            report.differences.append(
                TokenDifference(
                    position,
                    token_id,
                    self._text_of(token_id),
                    draw.token_id,
                    self._text_of(draw.token_id),
                    gap,
                    gap / float(logits_V.abs().max()),
                )
            )
        try:
            delta = decoder.force_token(SequenceToken(token_id, b"", 0.0))
        except ValueError:  # the grammar does not allow the token
            report.problems.append(f"token {position} does not fit the format that was asked for")
            return None
        self._text.append(delta.text)
        return token_id

    def _compare_logprob(self, position: int, token_id: int, logits_V: Tensor) -> None:
        listed = self._saved.tokens
        if not listed or (claimed := listed[position].logprob) is None:
            return
        computed = float(logits_V[token_id] - torch.logsumexp(logits_V, -1))
        error = abs(max(computed, MIN_LOGPROB) - claimed)
        # Not a number: no error would be larger.
        error = error if error == error else math.inf
        self._logprob_errors.append(error)

    def _check_end(
        self, tokens: Sequence[int], text: str, parser: ToolCallParser | None, notes: list[str]
    ) -> None:
        """Whether text, calls and finish reason are those of the compared tokens."""
        report, saved = self._report, self._saved
        if saved.finish_reason is None:
            notes.append(f"choice {report.index} has no finish reason: it was cut off")
        has_stopped = saved.finish_reason in ("stop", "tool_calls")
        if has_stopped != self._decoder.is_done:
            what = "goes on" if has_stopped else "ends"
            report.problems.append(
                f"its finish reason is {saved.finish_reason!r}, but after its tokens it {what}"
            )
            return
        made = "".join(self._text)
        if not has_stopped:
            # Including what is held back while an answer goes on.
            made = self._table.vocabulary.detokenizer_rules.decode(list(tokens)).rstrip(REPLACEMENT)
        calls: list[tuple[str, object]] = []
        if parser is not None:
            content = parser.feed(made)
            rest, found = parser.finish()
            made = content + rest
            calls = [_parsed_call(**call["function"]) for call in found]
        claimed = [_parsed_call(name, arguments) for name, arguments in saved.tool_calls.values()]
        if claimed != calls:
            report.problems.append("its tool calls are not those of its tokens")
        is_same = made.startswith(text) if saved.finish_reason is None else made == text
        if not is_same:
            report.problems.append("its text is not that of its tokens")

    def _text_of(self, token_id: int) -> str:
        return self._table.vocabulary.token_bytes(token_id).decode(errors="replace")


def _parsed_call(name: str, arguments: str) -> tuple[str, object]:
    """A call, without what JSON may write in several ways."""
    try:
        return name, json.loads(arguments)
    except (ValueError, RecursionError):
        return name, arguments


class _FedTokens:
    """Logits after a prompt and after each of the tokens that were fed behind it."""

    def __init__(
        self, session: InferenceSession, prompt: Sequence[int], tokens: Sequence[int], room: int
    ) -> None:
        self._session = session
        self._start = len(prompt)
        self._room = room
        self._fed: list[int] = []
        prompt_T = torch.tensor(prompt)
        self._hidden_TD = session.feed([prompt_T], want="last")
        self._logits: tuple[int, Tensor] | None = None
        self._append(tokens)

    def require(self, tokens: Sequence[int], guess: Callable[[], list[int]]) -> None:
        """Have `tokens` fed, of which all but the last were; with what may follow if it was not."""
        if len(tokens) > self._room:
            raise UncheckableAnswerError("the model gives far more tokens than the text tells")
        last = len(tokens) - 1
        if self._fed[last : last + 1] == [tokens[-1]]:
            return
        self._session.rollback([self._start + last])
        del self._fed[last:]
        self._hidden_TD = self._hidden_TD[: last + 1]
        self._logits = None
        self._append([tokens[-1], *guess()])

    def logits(self, position: int) -> Tensor:
        """Float32 logits [V] of the answer's token at `position`."""
        start = position - position % MAX_HEAD_TOKENS
        if self._logits is None or self._logits[0] != start:
            hidden_TD = self._hidden_TD[start : start + MAX_HEAD_TOKENS]
            self._logits = start, self._session.ends.head(hidden_TD).float()
        return self._logits[1][position - start]

    def _append(self, tokens: Sequence[int]) -> None:
        tokens = tokens[: self._room - len(self._fed)]
        for at in range(0, len(tokens), MAX_PROMPT_CHUNK_TOKENS):
            piece = tokens[at : at + MAX_PROMPT_CHUNK_TOKENS]
            hidden_TD = self._session.feed([torch.tensor(piece)], want="all")
            self._hidden_TD = torch.cat([self._hidden_TD, hidden_TD])
            self._fed += piece


@contextmanager
def _feed(
    model: DistributedModelForCausalLM, prompt: Sequence[int], tokens: Sequence[int]
) -> Iterator[_FedTokens]:
    """Tokens fed behind a prompt, with room for about as many again."""
    room = min(2 * len(tokens) + _SPARE_TOKENS, model.context_length - len(prompt))
    if room < len(tokens):
        raise UncheckableAnswerError(
            f"prompt and answer have {len(prompt) + len(tokens)} tokens, the model holds "
            f"{model.context_length}"
        )
    with model.inference_session(len(prompt) + room) as session:
        yield _FedTokens(session, prompt, tokens, room)
