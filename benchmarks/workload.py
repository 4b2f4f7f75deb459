"""Sessions that generate one text after another until they are told to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from benchmarks.generation import Generation, generate
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.inference_session import InferenceSession

_PAUSE_AFTER_FAILURE_S = 1.0


@dataclass
class Worker:
    """One thread: a new session for each of its prompts, round and round."""

    model: DistributedModelForCausalLM
    prompts: Sequence[torch.Tensor]
    new_tokens: int
    generations: list[tuple[int, Generation]] = field(default_factory=list)
    """The number of the prompt, and what came of it."""
    failures: list[str] = field(default_factory=list)
    session: InferenceSession | None = None
    """The one that generates now."""

    def run(self, stopping: threading.Event) -> None:
        """At least once through the prompts; a text that was begun is finished."""
        number = 0
        while number < len(self.prompts) or not stopping.is_set():
            self._generate(number % len(self.prompts))
            number += 1

    def peers(self) -> frozenset[str]:
        """Who runs the present session."""
        session = self.session
        return frozenset() if session is None else frozenset(hop.peer_id for hop in session.hops)

    def token_times(self) -> list[tuple[float, ...]]:
        return [generation.token_times for _, generation in self.generations]

    def _generate(self, number: int) -> None:
        prompt = self.prompts[number]
        try:
            with self.model.inference_session(prompt.shape[1] + self.new_tokens) as session:
                self.session = session
                done = generate(self.model, prompt, self.new_tokens, session=session)
                self.generations.append((number, done))
        except Exception as error:
            # Whatever it is, this session has failed, which is what is counted here.
            self.failures.append(f"{type(error).__name__}: {error}")
            time.sleep(_PAUSE_AFTER_FAILURE_S)
        finally:
            self.session = None


@contextmanager
def working(workers: Sequence[Worker], stopping: threading.Event) -> Iterator[None]:
    """All of them at once; at the end they are told to stop, and waited for."""
    threads = [
        threading.Thread(target=worker.run, args=(stopping,), name=f"session-{number}")
        for number, worker in enumerate(workers)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
