"""A client process of `thread_settings`: reads numbers of tokens, writes what it generated."""

from __future__ import annotations

import argparse
import json
import sys

from nesa_node.cli.process_setup import limit_openmp_spinning

limit_openmp_spinning()  # Before torch is imported, as the command does.

import torch  # noqa: E402

from benchmarks.generation import generate  # noqa: E402
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM  # noqa: E402
from nesa_node.engine.kernels.threads import fix_threads  # noqa: E402

MOST_IDS = 300
"""Of the random prompt, so that every model has them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("peers", nargs="+")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        fix_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    prompt_1L = torch.randint(3, MOST_IDS, (1, arguments.prompt_tokens), generator=generator)
    with AutoDistributedModelForCausalLM.from_pretrained(
        arguments.folder,
        initial_peers=arguments.peers,
        dtype=getattr(torch, arguments.dtype),
        reuse_prefix=False,
    ) as model:
        for line in sys.stdin:
            made = generate(model, prompt_1L, int(line))
            told = {"tokens_per_s": made.tokens_per_s, "tokens": made.tokens}
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
