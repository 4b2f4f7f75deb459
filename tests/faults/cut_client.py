"""A client that tells how it gets on: `python -m tests.faults.cut_client MODEL TEXTS PEER...`.

Lines of JSON on stdout: {"hops": peer ids} at both ends of each text, {"at": time} of each token,
{"ids": tokens} of the whole text. It waits for a line on stdin before each text.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from tests.client.local_models import random_ids
from tests.faults.runs import generate


class Times(BaseStreamer):
    def put(self, value: Tensor) -> None:
        _tell(at=time.monotonic())

    def end(self) -> None:
        pass


def _tell(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    model_path, texts, *peers = sys.argv[1:]
    with AutoDistributedModelForCausalLM.from_pretrained(
        model_path, initial_peers=peers, recovery_timeout_s=40.0, step_timeout_s=30.0
    ) as model:
        for seed in range(int(texts)):
            sys.stdin.readline()
            with model.inference_session(128) as session:
                _tell(hops=[hop.peer_id for hop in session.hops])
                ids_BL = generate(model, random_ids(1, 20, seed=seed), session, streamer=Times())
                _tell(hops=[hop.peer_id for hop in session.hops])
            _tell(ids=ids_BL.tolist())


if __name__ == "__main__":
    main()
