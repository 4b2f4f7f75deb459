"""An honest client that generates without pause, and compares its tokens with transformers'."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.session.route import SessionRoute
from tests.client.local_models import left_padded
from tests.engine.tiny_models import reference
from tests.hostile.push_attacks import Victim
from tests.same_tokens import assert_same_as, run_reference

NEW_TOKENS = 40
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}


class Bystander:
    """`tokens` counts what was generated and equal so far; `error` is what went wrong."""

    def __init__(self, folder: Path, addresses: Sequence[str]) -> None:
        self.tokens = 0
        self.recoveries = 0
        self.error: BaseException | None = None
        self._ids_BL, self._mask_BL = left_padded([12])
        self._run = run_reference(reference(folder), self._ids_BL, self._mask_BL, **OPTIONS)
        self._model = AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, routing="chain", dtype=torch.float32
        )
        self._route: SessionRoute | None = None
        self._stopping = threading.Event()

    def victim(self) -> Victim:
        """All that a push into the running session, or the last one, would need."""
        assert self._route is not None, "nothing was generated yet"
        return Victim(self._route.session, self._route.opener._secret, self._route.epoch)

    def generate(self) -> None:
        """One text through a session of its own."""
        with self._model.inference_session(max_length=64) as session:
            blocks: Any = session._blocks
            self._route = blocks._route
            ours_BL = self._model.generate(
                self._ids_BL, attention_mask=self._mask_BL, session=session, **OPTIONS
            )
            self.recoveries += blocks.recoveries
        assert_same_as(self._run, ours_BL)
        self.tokens += NEW_TOKENS

    def go_on(self) -> None:
        try:
            while not self._stopping.is_set():
                self.generate()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._stopping.set()


@contextmanager
def bystander(folder: Path, addresses: Sequence[str]) -> Iterator[Bystander]:
    """Generates in a thread of its own for as long as the context; raises what it met."""
    one = Bystander(folder, addresses)
    with one._model:
        one.generate()
        thread = threading.Thread(target=one.go_on, name="bystander")
        thread.start()
        try:
            yield one
        finally:
            one.stop()
            thread.join()
    if one.error is not None:
        raise one.error
