"""A node cannot tell, before it has sealed its work, whether a session will be audited."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_predict

from nesa_node.core.settings.choices import RouteName
from nesa_node.swarm.protocol.messages import Message, Open
from nesa_node.swarm.protocol.seal_messages import Disclose, SealRequest
from nesa_node.swarm.protocol.stream import Stream
from tests.client.local_models import random_ids
from tests.e2e.joining import ROUTES, joined
from tests.e2e.liars import calibrate_tiny_models
from tests.engine.tiny_models import BLOCKS
from tests.swarms import in_process_swarm, thirds

SESSIONS = 600
MAX_AUC = 0.55
KEPT_MESSAGES = 8
Seen = tuple[float, Message, int]
"""When a message came, and the size of its payload."""


class Spy:
    """What a node's streams receive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_stream: dict[int, list[Seen]] = {}
        receive = Stream.receive

        async def received(stream: Stream, *args: Any, **kwargs: Any) -> Any:
            message, payload = await receive(stream, *args, **kwargs)
            if threading.current_thread().name == "nodes":
                if isinstance(message, Open):
                    self.by_stream[id(stream)] = []
                if (seen := self.by_stream.get(id(stream))) is not None:
                    seen.append((time.perf_counter(), message, len(payload)))
            return message, payload

        monkeypatch.setattr(Stream, "receive", received)

    def sessions(self) -> list[tuple[bool, list[float]]]:
        """Whether each was audited, and what was seen of it until it had to be sealed."""
        found = []
        for seen in self.by_stream.values():
            kinds = [type(message) for _, message, _ in seen]
            is_audited = SealRequest in kinds
            # Of the node before an audited one, which has done its work, something is asked, too.
            ends = [at for at, kind in enumerate(kinds) if kind in (SealRequest, Disclose)]
            before = seen[: ends[0] if ends else -1]
            times = [at - before[0][0] for at, *_ in before]
            gaps = np.diff(times)
            opened = before[0][1]
            assert isinstance(opened, Open)
            features = [
                len(before), times[-1], gaps.mean(), gaps.std(), gaps.max(), opened.max_tokens,
                opened.epoch, len(opened.trace), len(opened.membership), len(opened.codecs),
                sum(size for *_, size in before),
            ]  # fmt: skip
            firsts = [*gaps[:KEPT_MESSAGES], *[0.0] * KEPT_MESSAGES][:KEPT_MESSAGES]
            found.append((is_audited, [*features, *firsts]))
        return found


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("route", ROUTES)
def test_a_node_cannot_guess_audits(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: RouteName
) -> None:
    """By messages, sizes and times, of sessions of which half are audited."""
    calibrate_tiny_models(monkeypatch)
    llama, rng = tiny("llama"), random.Random(1)
    with (
        in_process_swarm(llama, thirds(BLOCKS), tmp_path) as addresses,
        joined(llama, addresses, route, audit=0.5) as model,
    ):
        connection: Any = model._ensure_connection()
        # No newcomers, of which all would be drawn.
        connection._auditor.history.passed = dict.fromkeys(
            (hop.peer_id for hop in model.inference_session(max_length=1).hops), 1000
        )
        spy = Spy(monkeypatch)
        for number in range(SESSIONS):
            prompt = random_ids(1, rng.randint(4, 12), seed=number)
            model.generate(prompt, max_new_tokens=rng.randint(2, 6), do_sample=False)
    found = [each for each in spy.sessions() if len(each[1])]
    audited = np.array([is_audited for is_audited, _ in found])
    assert 0.45 < audited.mean() < 0.55
    features = np.array([seen for _, seen in found])
    guess = RandomForestClassifier(300, min_samples_leaf=20, n_jobs=1, random_state=0)
    chances = cross_val_predict(guess, features, audited, cv=5, method="predict_proba")[:, 1]
    auc = float(roc_auc_score(audited, chances))
    print(f"{route}: {len(found)} sessions at nodes, AUC of guesses {auc:.3f}")
    assert auc <= MAX_AUC
