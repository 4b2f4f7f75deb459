"""What drafts bring between distant machines: time for each token of real texts, by what drafts.

Talk, code, and summaries of a quoted text, answered greedily by a model with a chat template. The
bound is the physical one of a step with one token: a step of transformers alone, and the way
through all nodes and back. Within a run all ways to draft take turns on the same text; the first
token, whose time is the prompt's, does not count.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.emulator.links import Link
from benchmarks.models import model_folder
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.wan.cells import Cell
from benchmarks.wan.sites import WanSwarm, open_wan_swarm

DEFAULTS = Options(
    model="demo",
    nodes=(3,),
    runs=6,
    new_tokens=128,
    round_trips_ms=(50,),
    bandwidths_mbit=(100,),
)
QUICK = Options(
    model="demo", nodes=(3,), runs=1, new_tokens=16, round_trips_ms=(50,), bandwidths_mbit=(100,)
)
QUOTED = (
    "The tide tables of a harbour are computed months ahead. For each hour they say how deep "
    "the water is at the entrance, and whether a ship of a given draught may pass. They rest "
    "on the positions of the sun and the moon, which are known, and on the shape of the "
    "coast, which is measured once and then again after each winter. Wind and air pressure "
    "are not in the tables: a storm from the west can raise the water by a metre, and a long "
    "spell of high pressure lowers it by a hand. Pilots therefore read the tables together "
    "with the forecast, and leave a margin."
)
TEXTS = {
    "chat": (
        "What should I see in Lisbon in two days?",
        "Explain to me how a bicycle stays upright.",
        "Give me five ideas for a birthday party at home.",
    ),
    "code": (
        "Write a Python class for a bank account with deposit and withdraw, with docstrings.",
        "Write a Python function that counts the words of a text file, and a test for it.",
        "Write an HTML page with a form that asks for name, email and a message.",
    ),
    "summary": (
        f"Summarize this text in a few sentences:\n\n{QUOTED}",
        f"Repeat this text, and correct its mistakes if there are any:\n\n{QUOTED}",
        f"List the facts of this text, quoting it:\n\n{QUOTED}",
    ),
}


def run(options: Options) -> list[dict[str, Any]]:
    """One row per kind of text and way to draft."""
    torch.set_num_threads(1)
    ways = ["off", "lookup", *([options.draft] if options.draft else [])]
    (round_trip_ms,), (bandwidth,) = options.round_trips_ms[:1], options.bandwidths_mbit[:1]
    cell = Cell(round_trip_ms, bandwidth, 1, "none")
    with model_folder(options) as folder, open_wan_swarm(folder, options) as swarm:
        rows = [
            row
            for kind, texts in TEXTS.items()
            for row in measure(swarm, cell, kind, texts, ways, options)
        ]
    show(rows, options)
    return rows


def measure(
    swarm: WanSwarm,
    cell: Cell,
    kind: str,
    texts: tuple[str, ...],
    ways: list[str],
    options: Options,
) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number in range(options.runs):
        text = texts[number % len(texts)]
        order = {"text": text, "new_tokens": options.new_tokens, "codec": "none"}
        swarm.wan.set_all(Link())
        for way in ways:
            # Joins the swarm, reads the draft model.
            swarm.ask({**order, "draft": way, "new_tokens": 2}, kind)
        alone = swarm.ask({**order, "codec": None}, kind)
        bound_s = swarm.chain.bound_s(cell, median(alone["gaps_s"]))
        swarm.wan.set_all(cell.link)
        for way in ways:
            answer = swarm.ask({**order, "draft": way}, kind)
            token_s = fmean(answer["gaps_s"])
            found[way].append(
                {
                    "token_s": token_s,
                    "bound_s": bound_s,
                    "local_s": median(alone["gaps_s"]),
                    "ratio": token_s / bound_s,
                    "tokens": len(answer["tokens"]),
                    "tokens_equal": answer["tokens"] == alone["tokens"],
                    "drafts": answer["drafts"],
                    "wire_bytes": answer["wire_bytes"],
                }
            )
    single = [one["token_s"] for one in found["off"]]
    return [
        {
            "kind": kind,
            "draft": "model" if way == options.draft else way,
            "token_s": fmean(one["token_s"] for one in runs),
            "bound_s": fmean(one["bound_s"] for one in runs),
            "ratio": fmean(one["ratio"] for one in runs),
            "of_single": max(
                one["token_s"] / alone_s for one, alone_s in zip(runs, single, strict=True)
            ),
            "tokens_equal": all(one["tokens_equal"] for one in runs),
            "runs": runs,
        }
        for way, runs in found.items()
    ]


def show(rows: list[dict[str, Any]], options: Options) -> None:
    headings = (
        "text|drafts|ms a token|bound\nms|of the\nbound|slowest, of\none a step|accepted|equal"
    )
    cells = [
        (
            row["kind"],
            row["draft"],
            f"{row['token_s'] * 1000:.1f}",
            f"{row['bound_s'] * 1000:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['of_single']:.2f}",
            _accepted(row["runs"][-1]["drafts"]),
            "yes" if row["tokens_equal"] else "NO",
        )
        for row in rows
    ]
    trip = options.round_trips_ms[0]
    print_table(f"drafts: {options.model}, {options.nodes[0]} daemons, {trip} ms", headings, cells)
    for way in dict.fromkeys(row["draft"] for row in rows):
        mean = fmean(row["ratio"] for row in rows if row["draft"] == way)
        print(f"{way}: {mean:.2f} of the bound in the mean")


def _accepted(drafts: dict[str, float]) -> str:
    """Of all texts so far: accepted tokens of those drafted, by source."""
    told = []
    for source in ("lookup", "model"):
        right = drafts.get(f"{source} accepted", 0)
        drafted = right + drafts.get(f"{source} rejected", 0)
        if drafted:
            told.append(f"{source} {right / drafted:.0%} of {drafted:.0f}")
    return ", ".join(told)
