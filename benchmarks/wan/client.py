"""The process that generates at the client's site.

    python -m benchmarks.wan.client SETTINGS

Each line on standard input is an order, each on standard output the answer, both in JSON. With null
for a codec it is transformers alone that generates. An order with a `text` is answered by the chat
template, by what it gives for `draft`.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.figures import gaps
from benchmarks.generation import TokenTimes, generate
from benchmarks.models import quiet_transformers, random_prompt
from benchmarks.wan.cells import CODECS
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.logging import setup_logging


def main() -> None:
    setup_logging("warning")
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    models: dict[tuple[str, str], DistributedModelForCausalLM] = {}
    with ExitStack() as stack:
        local: Any = None
        for line in sys.stdin:
            order = json.loads(line)
            if order["codec"] is None:
                model = local = local or load_local(settings)
            else:
                key = order["codec"], order.get("draft", "off")
                if key not in models:
                    models[key] = stack.enter_context(join(settings, *key))
                model = models[key]
            found = answer_text(settings, model, order) if "text" in order else answer(model, order)
            print(json.dumps(found), flush=True)


def load_local(settings: dict[str, Any]) -> Any:
    """The whole model in transformers."""
    auto: Any = AutoModelForCausalLM
    with quiet_transformers():
        return auto.from_pretrained(
            settings["folder"],
            dtype=settings["dtype"],
            local_files_only=True,
            trust_remote_code=False,
        ).eval()


def join(settings: dict[str, Any], codec: str, draft: str) -> DistributedModelForCausalLM:
    return AutoDistributedModelForCausalLM.from_pretrained(
        settings["folder"],
        initial_peers=settings["peers"],
        dtype=settings["dtype"],
        # The same prompt is timed again and again.
        reuse_prefix=False,
        draft=draft,
        **CODECS[codec].arguments,
    )


def answer(model: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Generate `new_tokens` for each of `batch` prompts. Seconds; the tokens of the first row."""
    rows = [
        random_prompt(model, order["prompt_tokens"], order["seed"] + row)
        for row in range(order["batch"])
    ]
    done = generate(model, torch.cat(rows), order["new_tokens"])
    return {
        "seconds": done.seconds,
        "first_token_s": done.first_token_s,
        "gaps_s": done.gaps_s,
        "tokens": done.tokens,
    }


def answer_text(settings: dict[str, Any], model: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Answer a text greedily, up to its end or `new_tokens`; what became of drafts so far."""
    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(
        settings["folder"], local_files_only=True, trust_remote_code=False
    )
    prompt_1L = tokenizer.apply_chat_template(
        [{"role": "user", "content": order["text"]}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    times = TokenTimes()
    ids_1L = model.generate(
        prompt_1L,
        attention_mask=torch.ones_like(prompt_1L),
        max_new_tokens=order["new_tokens"],
        do_sample=False,
        streamer=times,
    )
    drafting = getattr(model, "drafting", None)
    samples = [] if drafting is None else list(drafting.samples())
    return {
        "gaps_s": gaps(times.times),
        "tokens": ids_1L[0, prompt_1L.shape[1] :].tolist(),
        "drafts": {" ".join(one.labels[1:]): one.value for one in samples if one.labels[1:]},
    }


if __name__ == "__main__":
    main()
