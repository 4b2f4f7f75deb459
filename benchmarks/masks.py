"""Products with vectors that masks hide: time and bytes before a token and for it; tokens a second.

Shapes, weights and inputs are those of `private`, on one thread. Before a token the client encrypts
and decrypts a mask, and the node multiplies it; for a token the node multiplies what the mask
hides. The model's row is of two daemons and a client with masks for all of the tokens; perplexity
is that of integer products and of float32, on the beginning of README.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.models import load_local, model_folder, random_prompt
from benchmarks.options import Options
from benchmarks.private import SHAPES, Matrix, Shape, sample_input, time_call
from benchmarks.results import format_cell, print_table
from benchmarks.swarms import READY_TIMEOUT_S, daemon_flags, open_local, torch_threads
from nesa_node.cli.services.local_swarm import local_swarm
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.ids import split_evenly
from nesa_node.core.metrics import KEPT_MASKS
from nesa_node.engine.weights.tokenizer import load_tokenizer
from nesa_node.privacy.masked_product import (
    MaskLayout,
    encode_integers,
    hide,
    make_integer_linear,
    mask_product_bytes,
    masked_bytes,
    multiply_encrypted_mask,
    multiply_masked,
    plan_mask_layout,
    quantize_inputs,
    quantize_rows,
    reveal,
)
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.ring import Residues, Ring
from nesa_node.privacy.sampling import random_masks
from nesa_node.privacy.secret_key import SecretKey

DEFAULTS = Options(model="demo", threads=(1,), runs=5, new_tokens=6)
QUICK = Options(model="tiny", threads=(1,), runs=1, new_tokens=2)

TEXT = Path(__file__).parents[1] / "README.md"
TEXT_TOKENS = 1000
PROMPT_TOKENS = 5


def run(options: Options) -> list[dict[str, Any]]:
    threads = options.threads[0]
    with torch_threads(threads), model_folder(options) as folder:
        ring = make_ring(RingParameters(), threads)
        shapes = SHAPES["tiny" if options.model == "tiny" else "published"]
        rows = [measure(ring, shape, options) for shape in shapes]
        rows.append(measure_model(folder, options))
    show(rows)
    return rows


def measure(ring: Ring, shape: Shape, options: Options) -> dict[str, Any]:
    rng = np.random.default_rng(options.seed)
    products = [_Product(ring, rng.normal(0, 0.02, each)) for each in shape.products]
    key = SecretKey(ring)
    runs = [
        _sum(each.run_once(key, sample_input(rng, each.layout.inputs)) for each in products)
        for _ in range(options.runs + 1)
    ][1:]  # the first one touches all memory once
    layouts = [each.layout for each in products]
    primes = ring.parameters.prime_bits
    before_bytes = sum(
        each.chunks * ring.degree * sum(primes[:3]) // 8 + mask_product_bytes(ring, each)
        for each in layouts
    )
    token_bytes = sum(masked_bytes(each.inputs + each.outputs) for each in layouts)
    return {
        "what": shape.name,
        **{name: median(each[name] for each in runs) for name in ("client_s", "node_s", "token_s")},
        "weight_bytes": sum(each.nbytes(ring.degree) for each in layouts) / shape.weights,
        "before_bytes": before_bytes,
        "token_bytes": token_bytes,
        "all_before_bytes": shape.layers * before_bytes,
        "all_token_bytes": shape.layers * token_bytes,
        "runs": runs,
    }


class _Product:
    def __init__(self, ring: Ring, weight_OI: Matrix) -> None:
        self._ring = ring
        integers_OI, _ = quantize_rows(weight_OI)
        self._integers = integers_OI
        self._linear = make_integer_linear(integers_OI)
        self.layout: MaskLayout = plan_mask_layout(len(weight_OI), weight_OI.shape[1], ring.degree)
        self._encoded: Residues = encode_integers(ring, self.layout, integers_OI)

    def run_once(self, key: SecretKey, x: Matrix) -> dict[str, float]:
        ring, layout = self._ring, self.layout
        (mask,) = random_masks(1, layout.inputs)
        started = time.perf_counter()
        fresh = [key.encrypt_mask(chunk) for chunk in layout.split(mask, ring.degree)]
        encrypted = time.perf_counter()
        ciphertexts = np.stack([each.expand(ring) for each in fresh])
        product = multiply_encrypted_mask(ring, layout, self._encoded, ciphertexts)
        multiplied = time.perf_counter()
        found = key.decrypt_products(*product, layout.places).reshape(-1)[: layout.outputs]
        decrypted = time.perf_counter()
        numbers, _ = quantize_inputs(x[None])
        hidden = hide(numbers, mask[None])
        asked = time.perf_counter()
        answer = multiply_masked(self._linear, hidden)
        answered = time.perf_counter()
        y = reveal(answer, found[None])
        assert np.array_equal(y, numbers @ self._integers.astype(np.int64).T)
        return {
            "client_s": encrypted - started + decrypted - multiplied,
            "node_s": multiplied - encrypted,
            "token_s": answered - asked,
        }


def _sum(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    listed = list(parts)
    return {name: sum(part[name] for part in listed) for name in listed[0]}


def measure_model(folder: Path, options: Options) -> dict[str, Any]:
    if options.model == "tiny":  # has no tokenizer
        ids = random_prompt(load_local(folder, options), 200, options.seed)
    else:
        ids = load_tokenizer(folder)(TEXT.read_text(), return_tensors="pt").input_ids
    prompt = ids[:, :PROMPT_TOKENS]
    stock = prompt.shape[1] + options.new_tokens
    flags = [*daemon_flags(options, 8 * stock, options.threads[0]), "--private", "masks"]
    spans = split_evenly(open_local(folder).num_blocks, 2)
    runs, stock_s = [], []
    with (
        TemporaryDirectory(prefix="nesa-bench-") as temporary,
        local_swarm(
            folder, spans, Path(temporary), flags=flags, ready_timeout_s=READY_TIMEOUT_S
        ) as daemons,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder,
            initial_peers=[node.addresses[0] for node in daemons],
            dtype=torch.float32,
            private="masks",
            stock=stock,
        ) as model,
    ):
        model.generate(prompt, max_new_tokens=1, do_sample=False)
        for _ in range(options.runs):
            stock_s.append(time_call(lambda: _wait_for_stock(model, stock)))
            runs.append(_decode(model, prompt, options.new_tokens))
    perplexities = _measure_perplexities(folder, ids[:, :TEXT_TOKENS])
    return {
        "what": f"{options.model}, from a stock of {stock} tokens",
        "token_s": median(runs),
        "stock_s": median(stock_s[1:] or stock_s),
        "runs": runs,
        "stock_runs": stock_s,
        **perplexities,
    }


def _decode(model: DistributedModelForCausalLM, prompt: torch.Tensor, count: int) -> float:
    """Seconds of each token after the prompt."""
    with model.inference_session(max_length=prompt.shape[1] + count) as session:
        logits = session.step(prompt)
        started = time.perf_counter()
        for _ in range(count):
            logits = session.step(logits[:, -1:].argmax(-1))
        return (time.perf_counter() - started) / count


def _wait_for_stock(model: DistributedModelForCausalLM, stock: int) -> None:
    while any(each.metric is KEPT_MASKS and each.value != stock for each in model.samples()):
        time.sleep(0.1)


@torch.inference_mode()
def _measure_perplexities(folder: Path, ids: torch.Tensor) -> dict[str, float]:
    model = load_local(folder, Options(dtype="float32"))
    plain = math.exp(model(ids, labels=ids).loss)
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear):
            _replace_by_integers(layer)
    return {"perplexity": plain, "masked_perplexity": math.exp(model(ids, labels=ids).loss)}


def _replace_by_integers(layer: nn.Linear) -> None:
    """Sums of these integers are exact in 64-bit floats."""
    integers_OI, scales_O = quantize_rows(layer.weight.double().numpy())
    weight = torch.from_numpy(integers_OI).double()

    def forward(x: torch.Tensor) -> torch.Tensor:
        numbers, scales = quantize_inputs(x.flatten(0, -2).double().numpy())
        y = (torch.from_numpy(numbers).double() @ weight.T).numpy() * scales_O * scales[:, None]
        return torch.from_numpy(y).to(x.dtype).view(*x.shape[:-1], -1)

    layer.forward = forward  # type: ignore[method-assign, assignment]  # one layer's


def show(rows: list[dict[str, Any]]) -> None:
    print_table(
        "Products with masked vectors",
        "what|client\nbefore, ms|node\nbefore, ms|for a\ntoken, ms|bytes per\nweight|"
        "before\nMB|for a\ntoken, KB|all layers\nMB",
        [
            [
                row["what"],
                format_cell(row, "client_s", "{:.1f}", 1e3),
                format_cell(row, "node_s", "{:.1f}", 1e3),
                format_cell(row, "token_s", "{:.2f}", 1e3),
                format_cell(row, "weight_bytes", "{:.1f}"),
                format_cell(row, "before_bytes", "{:.2f}", 1e-6),
                format_cell(row, "token_bytes", "{:.0f}", 1e-3),
                format_cell(row, "all_before_bytes", "{:.0f}", 1e-6),
            ]
            for row in rows
        ],
    )
    print(
        "stock made in {stock_s:.1f} s; perplexity {masked_perplexity:.3f}, float32 "
        "{perplexity:.3f}".format(**rows[-1])
    )
