"""Two checkouts in one swarm: `python -m tests.house.compatibility OLD NEW`.

Daemons of one checkout serve a client of the other one, and daemons of both serve clients of both.
In each swarm a client decodes with chain and star: one greedy text, during which a daemon of the
middle blocks is killed, then one by beam search and one sampled. Each text must have the tokens of
the whole model in transformers; the exit status is 1 if one differs.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from tests.house.walks import Process, Swarm

TOKENS, KILL_AFTER = 120, 40
BEAMS = {"num_beams": 3, "do_sample": False, "max_new_tokens": 24}
SAMPLED = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 48}
PROMPT = [5, 9, 14, 21, 33, 7, 8, 40]
# The client's ready file names the hops at token `KILL_AFTER`, where the text waits for a file
# `client.go`; at the end it has the hops after the greedy text and all tokens.
WORK = f"""
    class Pause:
        seen = 0
        def put(self, tokens):
            self.seen += 1
            if self.seen == {KILL_AFTER}:
                write({{"hops": [str(hop.peer_id) for hop in session.hops]}})
                while not go.exists():
                    time.sleep(0.01)
        def end(self):
            pass

    ids = torch.tensor([{PROMPT}])
    with model.inference_session({TOKENS + 2 * len(PROMPT)}) as session:
        greedy = model.generate(
            ids, session=session, max_new_tokens={TOKENS}, do_sample=False, streamer=Pause()
        )
        after = [str(hop.peer_id) for hop in session.hops]
    beams = model.generate(ids, **{BEAMS})
    torch.manual_seed(3)
    sampled = model.generate(ids, **{SAMPLED})
    texts = [text.tolist() for text in (greedy, beams, sampled)]
    write({{"texts": texts, "hops": after}})
"""
CLIENT = """\
import json, os, pathlib, sys, time, torch
from nesa_node import AutoDistributedModelForCausalLM
name, peer, ready, routing = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), sys.argv[4]
go = ready.with_suffix(".go")
def write(value):
    ready.with_suffix(".new").write_text(json.dumps(value))
    os.replace(ready.with_suffix(".new"), ready)
options = {"initial_peers": [peer], "routing": routing}
with AutoDistributedModelForCausalLM.from_pretrained(name, **options) as model:"""


class Case(NamedTuple):
    """Which checkout the daemons of blocks 0, 1 to 2 (two of them) and 3 have, and the client."""

    first: Path
    middle: tuple[Path, Path]
    last: Path
    client: Path


def cases(old: Path, new: Path) -> list[Case]:
    return [
        Case(old, (old, old), old, new),
        Case(new, (new, new), new, old),
        Case(old, (new, old), new, new),
        Case(new, (old, new), old, old),
    ]


def reference(model: Path) -> list[Any]:
    """Tokens of the three texts from the whole model."""
    local: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    greedy = local.generate(ids, max_new_tokens=TOKENS, do_sample=False)
    beams = local.generate(ids, **BEAMS)
    torch.manual_seed(3)
    return [text.tolist() for text in (greedy, beams, local.generate(ids, **SAMPLED))]


def run_case(case: Case, routing: str) -> tuple[list[bool], bool]:
    """Whether each text equals that of the whole model; whether the twin took over."""
    with ExitStack() as stack:
        swarm = Swarm(case.first, stack)
        first = swarm.daemon("first", "--block-indices", "0:1")
        swarm.join = ("--initial-peers", first.ready()["addresses"][0])
        swarm.root = case.last
        swarm.daemon("last", "--block-indices", "3:4").ready()
        twins: dict[str, Process] = {}
        for name, root in zip(("middle", "twin"), case.middle, strict=True):
            swarm.root = root
            process = swarm.daemon(name, "--block-indices", "1:3")
            twins[process.ready()["peer_id"]] = process
        swarm.root = case.client
        arguments = (swarm.model, swarm.join[-1], "client.ready", routing)
        client = swarm.start("client", "-c", CLIENT + WORK, *arguments)
        victim = next(peer for peer in client.ready()["hops"] if peer in twins)
        twins.pop(victim).popen.send_signal(signal.SIGKILL)
        (swarm.folder / "client.go").touch()
        ready = swarm.folder / "client.ready"
        client.wait_for(lambda: "texts" in json.loads(ready.read_text("utf-8")))
        result = client.ready()
        pairs = zip(result["texts"], reference(Path(swarm.model)), strict=True)
        return [text == whole for text, whole in pairs], not twins.keys().isdisjoint(result["hops"])


def main(argv: list[str]) -> int:
    old, new = (Path(argument).resolve() for argument in argv)
    failed = 0
    for case in cases(old, new):
        for routing in ("chain", "star"):
            equal, replaced = run_case(case, routing)
            failed += not (all(equal) and replaced)
            daemons = (case.first, *case.middle, case.last)
            names = ", ".join("old" if root == old else "new" for root in daemons)
            client = "old" if case.client == old else "new"
            print(f"daemons {names}; client {client}; {routing}: killed node replaced: {replaced};")
            print(f"    greedy, beams, sampled equal: {equal}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
