"""A link between two nodes of a chain is cut, while both still answer the client."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.emulator import namespaces
from benchmarks.emulator.links import Link
from benchmarks.emulator.wan import Wan, open_wan
from nesa_node.core.ids import Span, split_evenly
from nesa_node.swarm.p2p.p2pd import remove_stale_directories
from tests.client.local_models import random_ids
from tests.engine.tiny_models import BLOCKS, NEW_TOKENS
from tests.faults.runs import RECOVERIES, assert_undisturbed

REASON = namespaces.why_unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=REASON or "")]

TEXTS = 5
CUT_AFTER = 9
"""Tokens of each text."""
NOTICED_S = 5.0
"""Where four processes share two cores with other work: 2 s is the aim, 30 s the step's timeout."""
READY_S = 120.0
CLIENT = "client"
FIRST, SECOND = split_evenly(BLOCKS, 2)


def _serve(wan: Wan, model: Path, folder: Path, spans: dict[str, Span]) -> dict[str, Any]:
    """A daemon at each site; returns what their ready files say, by site."""
    ready: dict[str, Any] = {}
    for sites in (list(spans)[:1], list(spans)[1:]):
        for site in sites:
            command = [sys.executable, "-m", "nesa_node", "run", str(model)]
            command += ["--block-indices", str(spans[site]), "--torch-dtype", "float32"]
            command += ["--threads", "1", "--attn-cache-tokens", "32768"]
            command += ["--host-maddrs", f"/ip4/{wan.address(site)}/tcp/0"]
            command += ["--ready-file", str(folder / f"{site}.json")]
            command += ["--identity-path", str(folder / f"{site}.key")]
            command += ["--initial-peers", *_addresses(ready)] if ready else []
            with (folder / f"{site}.log").open("wb") as log:
                wan.popen(site, command, stdout=log, stderr=subprocess.STDOUT)
        for site in sites:
            ready[site] = _read_when_there(folder / f"{site}.json")
    return ready


def _addresses(ready: dict[str, Any]) -> list[str]:
    return [each["addresses"][0] for each in ready.values()]


def _read_when_there(path: Path) -> Any:
    deadline = time.monotonic() + READY_S
    while not path.exists():
        assert time.monotonic() < deadline, path.with_suffix(".log").read_text()
        time.sleep(0.1)
    return json.loads(path.read_text())


class Client:
    def __init__(self, wan: Wan, model: Path, addresses: Sequence[str]) -> None:
        command = [sys.executable, "-m", "tests.faults.cut_client", str(model), str(TEXTS)]
        self._process = wan.popen(
            CLIENT,
            [*command, *addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._told = self._process.stdin, self._process.stdout

    def begin(self) -> None:
        self._orders.write("\n")
        self._orders.flush()

    def hears(self, what: str) -> Any:
        line = json.loads(self._told.readline())
        assert list(line) == [what]
        return line[what]

    def close(self) -> None:
        self._orders.close()
        self._process.wait(30)
        self._told.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("doubled", [FIRST, SECOND], ids=["upstream", "downstream"])
def test_link_that_is_cut_is_noticed_long_before_a_step_is_overdue(
    alone: PreTrainedModel, tiny_llama: Path, tmp_path: Path, doubled: Span
) -> None:
    spans = {"a": FIRST, "b": SECOND, "c": doubled}
    with open_wan([CLIENT, *spans]) as wan:
        ready = _serve(wan, tiny_llama, tmp_path, spans)
        sites = {each["peer_id"]: site for site, each in ready.items()}
        client = Client(wan, tiny_llama, _addresses(ready))
        for seed in range(TEXTS):
            client.begin()
            before = [sites[peer] for peer in client.hears("hops")]
            times = [client.hears("at") for _ in range(CUT_AFTER)]
            upstream, downstream = before
            wan.set_link(upstream, downstream, Link(up=False))
            times += [client.hears("at") for _ in range(NEW_TOKENS + 1 - CUT_AFTER)]
            after = [sites[peer] for peer in client.hears("hops")]
            ids_BL = torch.tensor(client.hears("ids"))
            wan.heal()
            assert_undisturbed(alone, ids_BL, random_ids(1, 20, seed=seed))
            changed = [spans[old] for old, new in zip(before, after, strict=True) if old != new]
            assert changed == [doubled]
            RECOVERIES["link cut"].append(max(end - start for start, end in pairwise(times)))
        client.close()
    # Killed daemons leave their runtime directories to the next one that starts.
    remove_stale_directories(Path(tempfile.gettempdir()))
    assert max(RECOVERIES["link cut"]) < NOTICED_S
