"""The process that generates at the client's site.

    python -m benchmarks.wan.client SETTINGS

Each line on standard input is an order, each on standard output the answer, both in JSON. With null
for a codec it is transformers alone that generates.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.generation import generate
from benchmarks.models import quiet_transformers, random_prompt
from benchmarks.wan.cells import CODECS
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.logging import setup_logging


def main() -> None:
    setup_logging("warning")
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    models: dict[str, DistributedModelForCausalLM] = {}
    with ExitStack() as stack:
        local: Any = None
        for line in sys.stdin:
            order = json.loads(line)
            if order["codec"] is None:
                local = local or load_local(settings)
                print(json.dumps(answer(local, order)), flush=True)
                continue
            codec = order["codec"]
            if codec not in models:
                models[codec] = stack.enter_context(join(settings, codec))
            print(json.dumps(answer(models[codec], order)), flush=True)


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


def join(settings: dict[str, Any], codec: str) -> DistributedModelForCausalLM:
    return AutoDistributedModelForCausalLM.from_pretrained(
        settings["folder"],
        initial_peers=settings["peers"],
        dtype=settings["dtype"],
        # The same prompt is timed again and again.
        reuse_prefix=False,
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


if __name__ == "__main__":
    main()
