"""`nesa-node generate MODEL "prompt"`: one answer, streamed to stdout."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from nesa_node.cli.answer_flags import SamplingFlags, load_answer_config
from nesa_node.cli.flags import OUTPUT, SAMPLING, Flags, ModelArgument
from nesa_node.cli.interrupts import exit_on_interrupt
from nesa_node.cli.prompt import check_utf8, read_prompt
from nesa_node.core.errors import ConfigError

if TYPE_CHECKING:
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
    return 0
