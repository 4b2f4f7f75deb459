"""`nesa-node generate` and `chat`: one streamed answer, or a conversation.

A conversation prefills only the new tokens of each turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from nesa_node.cli.flags import (
    OUTPUT,
    SAMPLING,
    Flags,
    ModelArgument,
    SamplingFlags,
    load_answer_config,
)
from nesa_node.cli.process_setup import exit_on_interrupt
from nesa_node.cli.standard_streams import accept_invalid_utf8, check_utf8, read_prompt
from nesa_node.core.errors import ConfigError, ContextLengthError, NesaError
from nesa_node.core.logging import escape_lines

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from nesa_node.cli.text_generation import GenerationParams, Message
    from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
    from nesa_node.client.model.inference_session import InferenceSession
    from nesa_node.core.settings.models import AnswerConfig


def generate(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None, Parameter(help="The text to answer; read from stdin when not given.")
    ] = None,
    /,
    *,
    max_new_tokens: Annotated[
        int | None, Parameter(group=SAMPLING, help="Most tokens of the answer. [default: 256]")
    ] = None,
    chat: Annotated[
        bool | None,
        Parameter(group=OUTPUT, help="Use the chat template. [default: if the model has one]"),
    ] = None,
    stats: Annotated[
        bool,
        Parameter(group=OUTPUT, negative=(), help="Print a table of what took how long to stderr."),
    ] = False,
    sampling: SamplingFlags | None = None,
    flags: Flags["AnswerConfig"] | None = None,
) -> int:
    """Answer PROMPT through the swarm: text is streamed to stdout, chain and speed go to stderr.

    Decodes greedily, unless --temperature or --top-p is given.
    """
    from nesa_node.cli.client_model import (
        describe_route,
        open_client_model,
        require_model,
        resolve_initial_peers,
        save_last_swarm,
    )
    from nesa_node.cli.views.phases import format_phases
    from nesa_node.core.wait_tracking import current_tracker

    config = load_answer_config(flags, model, max_new_tokens)
    chosen = (sampling or SamplingFlags()).check()
    require_model(config)
    config = resolve_initial_peers(config, config.model)
    text = check_utf8(read_prompt() if prompt is None else prompt, "the prompt")
    if not text.strip():
        raise ConfigError("the prompt is empty: give it as an argument or on stdin")

    with exit_on_interrupt():
        from nesa_node.cli.text_generation import GenerationParams, encode_messages, generate_answer

    distributed, tokenizer = open_client_model(config)
    with distributed:
        template = tokenizer.chat_template is not None if chat is None else chat
        if template and tokenizer.chat_template is None:
            raise ConfigError(f"{config.model} has no chat template: leave --chat away")
        ids_1L = encode_messages(tokenizer, [{"role": "user", "content": text}], template=template)
        options = GenerationParams(max_new_tokens=max_new_tokens or 256, **chosen)
        length = ids_1L.shape[1] + options.max_new_tokens
        with distributed.inference_session(length, prompt=ids_1L) as session:
            result = generate_answer(
                distributed, tokenizer, ids_1L, options, out=sys.stdout, session=session
            )
            save_last_swarm(config, config.model)
            print(
                f"[{ids_1L.shape[1]} + {len(result.token_ids)} tokens, first after "
                f"{result.first_token_s:.2f} s, then {result.tokens_per_s:.1f} tokens/s, "
                f"{describe_route(session)}]",
                file=sys.stderr,
            )
            spent = session.spent_epsilon
    if stats and spent is not None:
        print(
            f"differential privacy of what was sent, this time alone: epsilon {spent:.4g}",
            file=sys.stderr,
        )
    if stats and (waits := current_tracker()) is not None:
        print(format_phases(waits.seconds, waits.age_s), file=sys.stderr)
    return 0


HELP_TEXT = (
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
    flags: Flags["AnswerConfig"] | None = None,
) -> int:
    """Talk with MODEL through the swarm. Ctrl-C stops an answer, Ctrl-D ends."""
    config = load_answer_config(flags, model, max_new_tokens)
    chosen = (sampling or SamplingFlags()).check()
    if max_length is not None and max_length < 1:
        raise ConfigError("--max-length must be at least 1; leave it away for up to 4096")
    check_utf8(system or "", "--system")

    from nesa_node.cli.client_model import ReconnectingModel

    following = ReconnectingModel(config)
    with exit_on_interrupt():
        from nesa_node.cli.text_generation import GenerationParams

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
        options = GenerationParams(max_new_tokens=max_new_tokens or 512, **chosen)
        talk = _Conversation(
            distributed,
            tokenizer,
            options,
            length,
            system,
            following.save_swarm,
            following.reconnect,
        )
        talk.check_first_message_fits()
        talk.run()
    return 0


class _Conversation:
    """The messages so far and the session that holds their KV cache."""

    def __init__(
        self,
        model: DistributedModelForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        sampling: GenerationParams,
        max_length: int,
        system: str | None,
        on_answer: Callable[[], None],
        reconnect: Callable[[], DistributedModelForCausalLM | None] = lambda: None,
    ) -> None:
        """`reconnect` is called after a failure: it may close `model` and return a newly opened
        one."""
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._max_length = max_length
        self._on_answer = on_answer
        self._reconnect = reconnect
        self._failed = False
        self._initial_messages: list[Message] = (
            [{"role": "system", "content": system}] if system else []
        )
        self._messages = list(self._initial_messages)
        self._session: InferenceSession | None = None
        self._statistics = "nothing was generated yet"

    def check_first_message_fits(self) -> None:
        """Raise `ContextLengthError` if even the shortest message does not fit."""
        ids_1L = self._encode_messages([*self._initial_messages, {"role": "user", "content": "."}])
        most = self._model.context_length
        more = f" or raise --max-length (at most {most})" if self._max_length < most else ""
        self._check_length(ids_1L, "the shortest message", f"lower --max-new-tokens{more}")

    def run(self) -> None:
        """Read lines until the end of input or /exit."""
        interactive = sys.stdin.isatty()
        accept_invalid_utf8()
        if interactive:
            print(HELP_TEXT, file=sys.stderr)
            with suppress(ImportError):
                import readline  # noqa: F401  (gives `input` its line editing)
        try:
            with suppress(EOFError):
                read = _read_terminal_line if interactive else input
                while (line := read().strip()) != "/exit":
                    self._handle_line(line, interactive=interactive)
            if self._session is not None:
                self._session.finish()
        finally:
            if self._session is not None:
                self._session.close()

    def _handle_line(self, line: str, *, interactive: bool) -> None:
        if line == "/reset":
            self._messages = list(self._initial_messages)
        elif line in ("/help", "/?"):
            print(HELP_TEXT, file=sys.stderr)
        elif line == "/stats":
            print(self._statistics, file=sys.stderr)
        elif line.startswith("/"):
            print(f"unknown command {line}; {HELP_TEXT}", file=sys.stderr)
        elif line and _is_valid_line(line):
            self._run_turn(line, interactive=interactive)

    def _run_turn(self, line: str, *, interactive: bool) -> None:
        began = len(self._messages) == len(self._initial_messages)
        self._messages.append({"role": "user", "content": line})
        try:
            ids_1L = self._encode_messages(self._messages)
            advice = "shorten the message" if began else "/reset starts over"
            self._check_length(ids_1L, "the conversation", advice)
            if self._failed and (moved := self._reconnect()) is not None:
                self._model, self._session = moved, None
            text = self._generate_answer(ids_1L)
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
            print(f"\nerror: {escape_lines(str(error))}", file=sys.stderr)
        else:
            self._messages.append({"role": "assistant", "content": text})
            self._failed = False

    def _encode_messages(self, messages: list[Message]) -> torch.Tensor:
        from nesa_node.cli.text_generation import encode_messages

        return encode_messages(self._tokenizer, messages, template=True)

    def _check_length(self, ids_1L: torch.Tensor, what: str, advice: str) -> None:
        tokens, new = ids_1L.shape[1], self._sampling.max_new_tokens
        if tokens + new > self._max_length:
            raise ContextLengthError(
                f"no room in {self._max_length} tokens (--max-length) for {tokens} of {what} and "
                f"{new} of an answer (--max-new-tokens): {advice}"
            )

    def _generate_answer(self, ids_1L: torch.Tensor) -> str:
        from nesa_node.cli.client_model import describe_route
        from nesa_node.cli.text_generation import generate_answer

        session = self._ensure_session(ids_1L)
        sent_before = session.tokens_sent
        result = generate_answer(
            self._model, self._tokenizer, ids_1L, self._sampling, out=sys.stdout, session=session
        )
        self._on_answer()
        self._statistics = (
            f"{ids_1L.shape[1]} tokens of context, {session.tokens_sent - sent_before} sent in the "
            f"last turn, first token after {result.first_token_s:.2f} s, then "
            f"{result.tokens_per_s:.1f} tokens/s, {describe_route(session)}"
        )
        return result.text

    def _ensure_session(self, ids_1L: torch.Tensor) -> InferenceSession:
        """The open session, or a new one if there is none or a failed step has closed it."""
        if self._session is None or self._session.closed:
            self._session = self._model.inference_session(self._max_length, prompt=ids_1L)
        return self._session


def _read_terminal_line() -> str:
    """Read a line from the terminal. Ctrl-C discards the typed text, as at Python's prompt."""
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends)", file=sys.stderr)


def _is_valid_line(line: str) -> bool:
    """Whether the line is valid text; prints an error if not."""
    try:
        check_utf8(line, "this line")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    return True
