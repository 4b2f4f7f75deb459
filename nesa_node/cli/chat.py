"""`nesa-node chat MODEL`: a conversation that prefills only the new tokens of each turn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from nesa_node.cli.answer_flags import AnswerFlags, SamplingFlags, answer_config
from nesa_node.cli.flags import SAMPLING, ModelArgument
from nesa_node.cli.interrupts import leaving_at_once
from nesa_node.cli.prompt import check_text, keep_odd_bytes
from nesa_node.core.errors import ConfigError, ContextLengthError, NesaError
from nesa_node.core.plain_text import plain_lines

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from nesa_node.cli.text import Message, Sampling
    from nesa_node.client.causal_lm import DistributedModelForCausalLM
    from nesa_node.client.inference import InferenceSession

HELP = (
    "/help shows this, /reset starts over, /stats shows the chain and speed, /exit (or Ctrl-D) ends"
)


def chat(
    model: ModelArgument = None,
    /,
    *,
    system: Annotated[
        str | None, Parameter(metavar="TEXT", help="Instructions before the conversation.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, Parameter(group=SAMPLING, help="Most tokens of one answer. [default: 512]")
    ] = None,
    max_length: Annotated[
        int | None,
        Parameter(group=SAMPLING, help="Tokens of the whole conversation. [default: up to 4096]"),
    ] = None,
    sampling: SamplingFlags | None = None,
    flags: AnswerFlags | None = None,
) -> int:
    """Talk with MODEL through the swarm. Ctrl-C stops an answer, Ctrl-D ends."""
    config = answer_config(flags, model, max_new_tokens)
    chosen = (sampling or SamplingFlags()).check()
    if max_length is not None and max_length < 1:
        raise ConfigError("--max-length must be at least 1; leave it away for up to 4096")
    check_text(system or "", "--system")

    from nesa_node.cli.client_model import FollowingModel

    following = FollowingModel(config)
    with leaving_at_once():
        from nesa_node.cli.text import Sampling

    with following:
        distributed, tokenizer = following.open()
        if tokenizer.chat_template is None:
            raise ConfigError(f"{config.model} has no chat template: use `nesa-node generate`")
        context = distributed.context_length
        length = max_length or min(4096, context)
        if length > context:
            raise ContextLengthError(
                f"--max-length {length} is more than the {context} tokens that {config.model} holds"
            )
        options = Sampling(max_new_tokens=max_new_tokens or 512, **chosen)
        talk = _Conversation(
            distributed, tokenizer, options, length, system, following.remember, following.moved
        )
        talk.check_room()
        with suppress(EOFError):
            talk.run()
    return 0


class _Conversation:
    """The messages so far and the session that holds their KV cache."""

    def __init__(
        self,
        model: DistributedModelForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        max_length: int,
        system: str | None,
        answered: Callable[[], None],
        moved: Callable[[], DistributedModelForCausalLM | None] = lambda: None,
    ) -> None:
        """Hold the model and options. `moved` is called after a failure: it may close `model` and
        return a newly opened one."""
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._max_length = max_length
        self._answered = answered
        self._moved = moved
        self._failed = False
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._session: InferenceSession | None = None
        self._figures = "nothing was generated yet"

    def check_room(self) -> None:
        """Raise `ContextLengthError` if even the shortest message does not fit."""
        ids_1L = self._encoded([*self._opening, {"role": "user", "content": "."}])
        most = self._model.context_length
        more = f" or raise --max-length (at most {most})" if self._max_length < most else ""
        self._check_room(ids_1L, "the shortest message", f"lower --max-new-tokens{more}")

    def run(self) -> None:
        """Read lines until the end of input or /exit. Raises `EOFError` at the end of input."""
        interactive = sys.stdin.isatty()
        keep_odd_bytes()
        if interactive:
            print(HELP, file=sys.stderr)
            with suppress(ImportError):
                import readline  # noqa: F401  (gives `input` its line editing)
        try:
            while (line := (_typed() if interactive else input()).strip()) != "/exit":
                self._handle(line, interactive=interactive)
        finally:
            self._close()

    def _handle(self, line: str, *, interactive: bool) -> None:
        if line == "/reset":
            self._messages = list(self._opening)
        elif line in ("/help", "/?"):
            print(HELP, file=sys.stderr)
        elif line == "/stats":
            print(self._figures, file=sys.stderr)
        elif line.startswith("/"):
            print(f"unknown command {line}; {HELP}", file=sys.stderr)
        elif line and _is_text(line):
            self._turn(line, interactive=interactive)

    def _turn(self, line: str, *, interactive: bool) -> None:
        began = len(self._messages) == len(self._opening)
        self._messages.append({"role": "user", "content": line})
        try:
            ids_1L = self._encoded(self._messages)
            advice = "shorten the message" if began else "/reset starts over"
            self._check_room(ids_1L, "the conversation", advice)
            if self._failed and (moved := self._moved()) is not None:
                self._model, self._session = moved, None
            text = self._answer(ids_1L)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(stopped)", file=sys.stderr)
            self._messages.pop()
        except ContextLengthError as error:
            if not interactive:
                raise
            self._messages.pop()
            print(f"error: {error}", file=sys.stderr)
        except NesaError as error:
            if not interactive:
                raise
            # The failed step closed the session; the next message opens a new one. The newline ends
            # a partial answer.
            self._messages.pop()
            self._failed = True
            print(f"\nerror: {plain_lines(str(error))}", file=sys.stderr)
        else:
            self._messages.append({"role": "assistant", "content": text})
            self._failed = False

    def _encoded(self, messages: list[Message]) -> torch.Tensor:
        from nesa_node.cli.text import encode

        return encode(self._tokenizer, messages, template=True)

    def _check_room(self, ids_1L: torch.Tensor, what: str, advice: str) -> None:
        tokens, new = ids_1L.shape[1], self._sampling.max_new_tokens
        if tokens + new > self._max_length:
            raise ContextLengthError(
                f"no room in {self._max_length} tokens (--max-length) for {tokens} of {what} and "
                f"{new} of an answer (--max-new-tokens): {advice}"
            )

    def _answer(self, ids_1L: torch.Tensor) -> str:
        from nesa_node.cli.client_model import route_text
        from nesa_node.cli.text import answer

        session = self._open(ids_1L)
        sent_before = session.tokens_sent
        result = answer(
            self._model, self._tokenizer, ids_1L, self._sampling, out=sys.stdout, session=session
        )
        self._answered()
        self._figures = (
            f"{ids_1L.shape[1]} tokens of context, {session.tokens_sent - sent_before} sent in the "
            f"last turn, first token after {result.first_token_s:.2f} s, then "
            f"{result.tokens_per_s:.1f} tokens/s, {route_text(session)}"
        )
        return result.text

    def _open(self, ids_1L: torch.Tensor) -> InferenceSession:
        """The open session, or a new one if there is none or a failed step has closed it."""
        if self._session is None or self._session.closed:
            self._session = self._model.inference_session(self._max_length, prompt=ids_1L)
        return self._session

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()


def _typed() -> str:
    """Read a line from the terminal. Ctrl-C discards the typed text, as at Python's prompt."""
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends)", file=sys.stderr)


def _is_text(line: str) -> bool:
    """Whether the line is valid text; prints an error if not."""
    try:
        check_text(line, "this line")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    return True
