"""Generations that something happens to, compared with undisturbed ones.

B rows, L columns.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.inference_session import InferenceSession
from nesa_node.core.settings.choices import RouteName
from tests.engine.tiny_models import NEW_TOKENS
from tests.faults.bed import Bed, Node
from tests.same_tokens import assert_same_tokens

ROUTES: tuple[RouteName, ...] = ("chain", "star")
TOKENS_AHEAD = 4
"""How many more tokens may come before a delayed blow has fallen: the generation waits for it."""
JOINED: list[DistributedModelForCausalLM] = []
"""Clients of the running test, whose audits must blame no node: all are honest."""
RECOVERIES: defaultdict[str, list[float]] = defaultdict(list)
"""Seconds from the blow to the next token, by what was done; printed at the end of the run."""


@dataclass
class Blow(BaseStreamer):
    """Strikes once the prompt and `after` new tokens have come, `delay_s` later.

    Without a delay that is between two steps; with one it is wherever the next steps have got to,
    at most `TOKENS_AHEAD` tokens later: a blow after the last token would prove nothing.
    """

    after: int
    strike: Callable[[], None]
    delay_s: float = 0.0
    pause_s: float = 0.0
    """How long to rest after every token, for events that take longer than the generation."""
    struck_at: float | None = None
    times: list[float] = field(default_factory=list)
    _timer: threading.Timer | None = None
    _failures: list[BaseException] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """The first call brings the prompt."""
        self.times.append(time.monotonic())
        if len(self.times) == self.after + 1:
            self.begin()
        elif len(self.times) == self.after + 1 + TOKENS_AHEAD and self._timer is not None:
            self._timer.join()
        time.sleep(self.pause_s)

    def end(self) -> None:
        pass

    def begin(self) -> None:
        if self.delay_s == 0.0:
            self._strike()
        else:
            self._timer = threading.Timer(self.delay_s, self._strike)
            self._timer.start()

    def _strike(self) -> None:
        self.struck_at = time.monotonic()
        try:
            self.strike()
        except BaseException as error:
            self._failures.append(error)

    def check(self) -> None:
        """Wait for the blow to have fallen. Raises what it raised."""
        if self._timer is not None:
            self._timer.join()
        assert self.struck_at is not None, "the generation ended before the blow"
        for failure in self._failures:
            raise failure

    def recovery_s(self) -> float:
        """From the blow to the end of the longest wait for a token after it."""
        assert self.struck_at is not None
        ends = [end for end in self.times if end > self.struck_at]
        assert ends, "no token came after the blow"
        starts = [self.struck_at, *ends[:-1]]
        waits = [(end - start, end) for start, end in zip(starts, ends, strict=True)]
        return max(waits)[1] - self.struck_at


def join_bed(bed: Bed, routing: RouteName, **options: Any) -> DistributedModelForCausalLM:
    """A client of the bed's swarm, which audits all work; close it."""
    options = {"recovery_timeout_s": 40.0, "audit": 1.0, **options}
    model = AutoDistributedModelForCausalLM.from_pretrained(
        bed.model, initial_peers=bed.addresses, routing=routing, **options
    )
    JOINED.append(model)
    return model


def holders(bed: Bed, session: InferenceSession) -> list[Node]:
    """The nodes that run the session, in the order of their blocks."""
    return [bed[hop.peer_id] for hop in session.hops]


def generate(
    model: DistributedModelForCausalLM,
    ids_BL: Tensor,
    session: InferenceSession,
    mask_BL: Tensor | None = None,
    *,
    new_tokens: int = NEW_TOKENS,
    **options: Any,
) -> Tensor:
    output: Tensor = model.generate(
        ids_BL,
        session=session,
        # Always given: transformers would take the random zeros of a prompt for padding.
        attention_mask=torch.ones_like(ids_BL) if mask_BL is None else mask_BL,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return output


def assert_undisturbed(
    alone: PreTrainedModel,
    output_BL: Tensor,
    ids_BL: Tensor,
    mask_BL: Tensor | None = None,
    *,
    new_tokens: int = NEW_TOKENS,
) -> None:
    """Every token was generated, and is the one that transformers alone generates."""
    assert output_BL.shape[1] == ids_BL.shape[1] + new_tokens
    assert_same_tokens(
        alone,
        output_BL,
        ids_BL,
        mask_BL,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )


def run_with_blow(
    alone: PreTrainedModel,
    model: DistributedModelForCausalLM,
    session: InferenceSession,
    ids_BL: Tensor,
    blow: Blow,
    name: str,
    mask_BL: Tensor | None = None,
    *,
    new_tokens: int = NEW_TOKENS,
) -> Tensor:
    """Generate with the blow falling and compare; notes the recovery time under `name`."""
    output_BL = generate(model, ids_BL, session, mask_BL, new_tokens=new_tokens, streamer=blow)
    blow.check()
    assert_undisturbed(alone, output_BL, ids_BL, mask_BL, new_tokens=new_tokens)
    RECOVERIES[name].append(blow.recovery_s())
    return output_BL
