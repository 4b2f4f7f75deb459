"""Table 1 and figure 4 of "Secure Multiparty Generative AI": blocks split among k servers.

By arithmetic for the paper's two models (`split_sizes.py`), and measured for one that fits here:
the client holds the first and the last block, k daemons the blocks between, in a star; k = 0 is
transformers alone. Rates are those of the last tokens before each length, in turns. Then what a
server of a small diffusion transformer sees of pictures (`image_states.py`).

One verifier for each split: votes ask for a model whose last blocks are on nodes, so that the
paper's n = 3 cannot be measured with the client's last block. `open_split` is where daemons are
started and asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.denoiser import PATCH, paint, train_denoiser
from benchmarks.generation import TokenTimes, generate
from benchmarks.image_states import ATTACKS, FIGURES, attack_steps
from benchmarks.models import load_local, model_folder, random_prompt
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.split_sizes import LLAMA, MB, PRINTED, SPLITS, VERIFIERS, make_rows
from benchmarks.swarms import READY_TIMEOUT_S, daemon_flags, open_local, torch_threads
from nesa_node.cli.services.local_swarm import local_swarm
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.ids import Span, split_evenly
from nesa_node.core.metrics import WIRE_BYTES

DEFAULTS = Options(model="demo", threads=(1,), runs=5, prompt_tokens=9, new_tokens=150)
"""The prompt is as long as the paper's seem to be; figures are taken at a third, two thirds and all
of the new tokens."""
QUICK = Options(model="tiny", threads=(1,), runs=1, prompt_tokens=9, new_tokens=24)
WINDOW = 16
"""Tokens that are timed before each length."""
DENOISING_STEPS = 28
"""As in the paper."""
TRAINING_STEPS, QUICK_TRAINING_STEPS = 1000, 2
OWN_PICTURES, QUICK_OWN_PICTURES = 256, 16
"""That the attacker had made."""
SECRET_PICTURES = 32
"""Of each run."""


def run(options: Options) -> list[dict[str, Any]]:
    sizes = list(make_rows())
    show_sizes(sizes)
    speeds = measure_splits(options)
    show_speeds(speeds)
    pictures = measure_pictures(options)
    show_pictures(pictures)
    return [*sizes, *speeds, *pictures]


def measure_splits(options: Options) -> list[dict[str, Any]]:
    """One row for each k."""
    lengths = tuple(options.new_tokens * third // 3 for third in (1, 2, 3))
    with (
        model_folder(options) as folder,
        torch_threads(options.threads[0]),
        ExitStack() as stack,
    ):
        local = load_local(folder, options)
        models = {
            splits: stack.enter_context(open_split(folder, options, splits)) if splits else local
            for splits in SPLITS
        }
        prompt = random_prompt(local, options.prompt_tokens, options.seed)
        for model in models.values():
            generate(model, prompt, 2)  # joins the swarm, touches all memory once
        runs = [
            {splits: _time_lengths(model, prompt, lengths) for splits, model in models.items()}
            for _ in range(options.runs)
        ]
        hidden = open_local(folder).config.hidden_size
    value_bytes = torch.empty(0, dtype=options.torch_dtype).element_size()
    return [
        _measured_row(
            [each[splits] for each in runs],
            {
                "part": "measured",
                "model": options.model,
                "splits": splits,
                "lengths": list(lengths),
                "printed_last_of_first": _last_of_first(PRINTED[LLAMA][splits].speeds),
                "wire_bytes_by_arithmetic": splits * 2 * hidden * value_bytes,
                "tokens_equal": all(each[splits]["tokens"] == each[0]["tokens"] for each in runs),
            },
        )
        for splits in SPLITS
    ]


def _measured_row(runs: Sequence[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any]:
    kept = [{name: each[name] for name in ("tokens_per_s", "wire_bytes")} for each in runs]
    return about | {
        "tokens_per_s": _medians([each["tokens_per_s"] for each in runs]),
        "last_of_first": median(_last_of_first(each["tokens_per_s"]) for each in runs),
        "wire_bytes": _medians([each["wire_bytes"] for each in runs]),
        "runs": kept,
    }


def _last_of_first(rates: Sequence[float]) -> float:
    return rates[-1] / rates[0]


@contextmanager
def open_split(
    folder: Path, options: Options, splits: int
) -> Iterator[DistributedModelForCausalLM]:
    """A client with the first and last block of a model, and `splits` daemons with the rest."""
    blocks = open_local(folder).num_blocks
    inner = [Span(1 + part.start, 1 + part.end) for part in split_evenly(blocks - 2, splits)]
    tokens = 4 * (options.prompt_tokens + options.new_tokens)
    with (
        TemporaryDirectory(prefix="nesa-bench-") as temporary,
        local_swarm(
            folder,
            inner,
            Path(temporary),
            flags=daemon_flags(options, tokens, options.threads[0]),
            ready_timeout_s=READY_TIMEOUT_S,
        ) as daemons,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder,
            initial_peers=[node.addresses[0] for node in daemons],
            dtype=options.torch_dtype,
            device=options.device,
            client_blocks=(1, 1),
            routing="star",
            reuse_prefix=False,
            # An audit would compute again beside the next run.
            audit=0,
        ) as model,
    ):
        yield model


def _time_lengths(model: Any, prompt: Tensor, lengths: Sequence[int]) -> dict[str, Any]:
    """Tokens per second and bytes per token, of the last tokens before each of `lengths`."""
    sent = [0]

    def note(_: int) -> None:
        sent.append(_wire_bytes(model))

    times = TokenTimes(note)
    done = generate(model, prompt, lengths[-1], times=times)
    window = min(WINDOW, lengths[0] - 1)
    pairs = [(length - 1 - window, length - 1) for length in lengths]
    at = done.token_times
    return {
        "tokens": done.tokens,
        "tokens_per_s": [window / (at[last] - at[first]) for first, last in pairs],
        "wire_bytes": [(sent[1 + last] - sent[1 + first]) / window for first, last in pairs],
    }


def _wire_bytes(model: Any) -> int:
    """Bytes of hidden states that the client has sent and received; 0 of transformers' model."""
    if not isinstance(model, DistributedModelForCausalLM):
        return 0
    values = [each.value for each in model.samples() if each.metric is WIRE_BYTES]
    return int(sum(value for value in values if isinstance(value, int | float)))


def measure_pictures(options: Options) -> list[dict[str, Any]]:
    """One row for each of what a server gets and returns, and each attack; figures by step."""
    is_quick = options.model == "tiny"
    count = QUICK_OWN_PICTURES if is_quick else OWN_PICTURES
    with torch_threads(options.threads[0]):
        steps = QUICK_TRAINING_STEPS if is_quick else TRAINING_STEPS
        transformer = train_denoiser(steps, options.seed)
        own, own_states = paint(transformer, count, DENOISING_STEPS, options.seed)
        secret = [
            paint(transformer, SECRET_PICTURES, DENOISING_STEPS, options.seed + 1 + number)
            for number in range(options.runs)
        ]
    rows = []
    for seen, (name, attack) in product(("received", "returned"), ATTACKS.items()):
        runs = [
            attack_steps(
                attack,
                getattr(own_states, seen),
                own.mean(1),
                getattr(states, seen),
                each.mean(1),
                PATCH,
            )
            for each, states in secret
        ]
        figures = {figure: _medians([each[figure] for each in runs]) for figure in FIGURES}
        about = {"part": "figure 4", "seen": seen, "attack": name}
        rows.append(about | figures | {"runs": runs})
    return rows


def show_sizes(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        "Table 1 by arithmetic, 16 bit; in brackets what the paper prints",
        "model|k|client, billions|MB|each server, billions|MB",
        [
            [
                row["model"],
                str(row["splits"]),
                _beside(row["client_parameters"], row["printed_client_parameters"], 1e9, 3),
                _beside(row["client_bytes"], row["printed_client_bytes"], MB, 0),
                _beside(_mean(row["server_parameters"]), row["printed_server_parameters"], 1e9, 3),
                _beside(_mean(row["server_bytes"]), row["printed_server_bytes"], MB, 0),
            ]
            for row in rows
            if row["size"] == min(each["size"] for each in rows if each["model"] == row["model"])
        ],
    )
    print_table(
        "Bytes of a token (MB) or of an iteration (MiB)",
        f"model|k|length, or side|the paper's|printed|ours|ours, {VERIFIERS} verifiers|less by"
        "|printed: tokens/s,\nor s/iteration",
        [
            [
                row["model"],
                str(row["splits"]),
                str(row["size"]),
                *(
                    f"{row[name] / row['wire_unit']:.{places}f}"
                    for name, places in (
                        ("paper_wire_bytes", 2),
                        ("printed_wire_bytes", 2),
                        ("wire_bytes", 3),
                        ("verified_wire_bytes", 3),
                    )
                ),
                f"{row['paper_wire_bytes'] / row['wire_bytes']:.0f} x",
                f"{row['printed_speed']}",
            ]
            for row in rows
            if row["splits"]
        ],
    )


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None


def _beside(ours: float | None, printed: float | None, unit: float, places: int) -> str:
    if ours is None or printed is None:
        return "-"
    return f"{ours / unit:.{places}f} ({printed / unit:.{places}f})"


def show_speeds(rows: Sequence[dict[str, Any]]) -> None:
    lengths = rows[0]["lengths"]
    names = "|".join(f"tokens/s\nat {length}" for length in lengths)
    sizes = "|".join(f"bytes/token\nat {length}" for length in lengths)
    last = f"{lengths[-1]} to {lengths[0]}"
    print_table(
        f"Measured: {rows[0]['model']}; hidden states only, one verifier",
        f"k|{names}|{last}|the paper's|{sizes}|by arithmetic|equal tokens",
        [
            [
                str(row["splits"]),
                *(f"{each:.2f}" for each in row["tokens_per_s"]),
                f"{row['last_of_first']:.3f}",
                f"{row['printed_last_of_first']:.3f}",
                *(f"{each:.0f}" for each in row["wire_bytes"]),
                str(row["wire_bytes_by_arithmetic"]),
                "yes" if row["tokens_equal"] else "NO",
            ]
            for row in rows
        ],
    )


def show_pictures(rows: Sequence[dict[str, Any]]) -> None:
    steps = len(rows[0]["own"])
    shown = (0, steps // 2, steps - 1)
    headings = "|".join(f"step {step + 1}|picture\nnamed" for step in shown)
    print_table(
        "Figure 4: correlation of what a server sees with the final picture (with further ones)",
        f"states|attack|{headings}",
        [
            [
                row["seen"],
                row["attack"],
                *(
                    cell
                    for step in shown
                    for cell in (
                        f"{row['own'][step]:.2f} ({row['chance'][step]:.2f})",
                        f"{row['named'][step]:.0%}",
                    )
                ),
            ]
            for row in rows
        ],
    )
    print(f"chance to name a picture: {1 / SECRET_PICTURES:.0%}")


def _medians(runs: Sequence[Sequence[float]]) -> list[float]:
    """Of each place."""
    return [median(values) for values in zip(*runs, strict=True)]
