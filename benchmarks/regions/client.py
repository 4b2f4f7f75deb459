"""The process that generates at a client's site: `python -m benchmarks.regions.client SETTINGS`.

Orders: "chain" opens a session and tells its hops; "begin" lets sessions generate one text after
another; "peers" tells who runs them now; "end" waits for them and tells what came of it.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.models import random_prompt
from benchmarks.regions.talk import obey
from benchmarks.workload import Worker, working
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.logging import setup_logging


class Client:
    """One connection for each strategy that is asked for."""

    def __init__(self, settings: dict[str, Any], stack: ExitStack) -> None:
        self._settings = settings
        self._stack = stack
        self._models: dict[str, DistributedModelForCausalLM] = {}
        self._working = ExitStack()
        self._workers: list[Worker] = []

    def answer(self, order: dict[str, Any]) -> Any:
        match order["do"]:
            case "chain":
                with self._model(order["strategy"]).inference_session(64) as session:
                    return _hops(session)
            case "begin":
                return self._begin(order)
            case "peers":
                return [sorted(worker.peers()) for worker in self._workers]
            case "end":
                return self._end()
        raise ValueError(order["do"])

    def _model(self, strategy: str) -> DistributedModelForCausalLM:
        if strategy not in self._models:
            made = AutoDistributedModelForCausalLM.from_pretrained(
                self._settings["folder"],
                initial_peers=self._settings["peers"],
                dtype="float32",
                reuse_prefix=False,
                strategy=strategy,  # type: ignore[arg-type]  # one of those that there are
                step_timeout_s=self._settings["step_timeout_s"],
            )
            self._models[strategy] = self._stack.enter_context(made)
        return self._models[strategy]

    def _begin(self, order: dict[str, Any]) -> int:
        self._workers = [
            Worker(
                model := self._model(strategy),
                [random_prompt(model, order["prompt_tokens"], seed)],
                order["new_tokens"],
            )
            for strategy, seed in order["sessions"]
        ]
        self._working = ExitStack()
        self._working.enter_context(working(self._workers, threading.Event()))
        return len(self._workers)

    def _end(self) -> list[dict[str, Any]]:
        self._working.close()
        return [
            {
                "tokens": [generation.tokens for _, generation in worker.generations],
                "times": [
                    (generation.started, *generation.token_times)
                    for _, generation in worker.generations
                ],
                "failures": worker.failures,
            }
            for worker in self._workers
        ]


def _hops(session: Any) -> list[tuple[str, int, int]]:
    return [(hop.peer_id, hop.span.start, hop.span.end) for hop in session.hops]


def main() -> None:
    setup_logging("info")
    torch.set_num_threads(1)
    with ExitStack() as stack:
        obey(Client(json.loads(sys.argv[1]), stack).answer)


if __name__ == "__main__":
    main()
