"""What each codec of `nesa_node/compression` does to hidden states: their size, error and speed.

On one thread, with hidden states of the demo model, two thirds through its blocks, of random
tokens; or with made-up ones (`--model thin`: hidden size 1024, Gaussian, 16 large channels). Speeds
count the bytes of the values before they are encoded. An error is that of a whole token, relative
to its norm.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import load_local, model_folder, random_prompt
from benchmarks.options import Options
from benchmarks.results import print_table
from nesa_node.compression import tensors
from nesa_node.compression.codecs import FAMILIES

DEFAULTS = Options(model="demo", runs=15, prompt_tokens=1024)
QUICK = Options(model="thin", runs=1, prompt_tokens=32)
_MESSAGE_NBYTES = 1 << 20
_DTYPES = (torch.bfloat16, torch.float32)


def run(options: Options) -> list[dict[str, Any]]:
    """One row per codec, dtype and message: one token, and 1 MiB."""
    torch.set_num_threads(1)
    hidden_TD = hidden_states(options)
    rows = []
    for dtype in _DTYPES:
        many = _MESSAGE_NBYTES // (hidden_TD.shape[1] * dtype.itemsize)
        for tokens in (1, many):
            message_TD = hidden_TD[-tokens:].to(dtype).contiguous()
            rows += [measure(message_TD, codec, options.runs) for codec in FAMILIES]
    show(rows)
    return rows


def hidden_states(options: Options) -> Tensor:
    """[T, D] float32, enough of them for 1 MiB in 16 bits."""
    generator = torch.Generator().manual_seed(options.seed)
    if options.model == "thin":
        made_TD = torch.randn(512, 1024, generator=generator)
        made_TD[:, ::64] *= 100
        return made_TD
    with model_folder(options) as folder:
        model = load_local(folder, options)
    kept: list[Tensor] = []
    layers = model.model.layers
    hook = layers[len(layers) * 2 // 3].register_forward_pre_hook(
        lambda _, given: kept.append(given[0][0].float())
    )
    with hook, torch.inference_mode():
        model(random_prompt(model, options.prompt_tokens, options.seed))
    repeats = -(-_MESSAGE_NBYTES // (2 * kept[0].numel()))
    return kept[0].repeat(repeats, 1)


def measure(message_TD: Tensor, codec: str, runs: int) -> dict[str, Any]:
    meta, payload = tensors.encode(message_TD, codec=codec)
    received = bytearray(payload)
    most = 2 * message_TD.nbytes + 64
    back_TD = tensors.decode(meta, received, max_bytes=most).float()
    error_TD = back_TD - message_TD.float()
    per_token = error_TD.norm(dim=1) / message_TD.float().norm(dim=1)
    encode_s = timed(lambda: tensors.encode(message_TD, codec=codec), runs)
    decode_s = timed(lambda: tensors.decode(meta, received, max_bytes=most), runs)
    return {
        "codec": meta.codec,
        "dtype": str(message_TD.dtype).removeprefix("torch."),
        "tokens": len(message_TD),
        "ratio": payload.nbytes / message_TD.nbytes,
        "worst_relative_error": per_token.max().item(),
        "encode_s": median(encode_s),
        "decode_s": median(decode_s),
        "encode_gb_per_s": message_TD.nbytes / median(encode_s) / 1e9,
        "decode_gb_per_s": message_TD.nbytes / median(decode_s) / 1e9,
        "runs": {"encode_s": encode_s, "decode_s": decode_s},
    }


def timed(work: Callable[[], object], runs: int) -> list[float]:
    """Seconds of each run, after one that is not counted."""
    work()
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return times


def show(rows: Sequence[dict[str, Any]]) -> None:
    cells = [
        (
            row["codec"],
            row["dtype"],
            str(row["tokens"]),
            f"{row['ratio']:.3f}",
            f"{row['worst_relative_error']:.1e}",
            *(f"{row[key] * 1e6:.0f}" for key in ("encode_s", "decode_s")),
            *(f"{row[key]:.2f}" for key in ("encode_gb_per_s", "decode_gb_per_s")),
        )
        for row in rows
    ]
    headings = "codec|dtype|tokens|ratio|worst\nrelative error|encode us|decode us|GB/s|GB/s"
    print_table("codecs: hidden states of one token and of 1 MiB", headings, cells)
