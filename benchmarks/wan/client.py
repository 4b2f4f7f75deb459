"""The process that generates at the client's site.

    python -m benchmarks.wan.client SETTINGS

Each line on standard input is an order, each on standard output the answer, both in JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.generation import generate
from benchmarks.models import random_prompt
from benchmarks.wan.cells import CODECS
from nesa_node.client.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model import AutoDistributedModelForCausalLM
from nesa_node.core.logging import setup_logging


def main() -> None:
    setup_logging("warning")
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    models: dict[str, DistributedModelForCausalLM] = {}
    with ExitStack() as stack:
        for line in sys.stdin:
            order = json.loads(line)
            codec = order["codec"]
            if codec not in models:
                models[codec] = stack.enter_context(join(settings, codec))
            print(json.dumps(answer(models[codec], order)), flush=True)


def join(settings: dict[str, Any], codec: str) -> DistributedModelForCausalLM:
    return AutoDistributedModelForCausalLM.from_pretrained(
        settings["folder"],
        initial_peers=settings["peers"],
        dtype=settings["dtype"],
        # The same prompt is timed again and again.
        reuse_prefix=False,
        **CODECS[codec].arguments,
    )


def answer(model: DistributedModelForCausalLM, order: dict[str, Any]) -> dict[str, Any]:
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
