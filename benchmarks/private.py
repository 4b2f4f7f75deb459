"""Products with encrypted vectors: time, bytes and error, beside the `mm` of the ZK-LLM report.

On one thread, weights as those of language models (normal, 0.02), inputs with one channel two
hundred times as large as the rest. A layer is its four products: of queries, keys and values; of
the attention's output; of gate and up; and the one down. TenSEAL runs as the report has it:
N = 8192, primes of 60, 40, 40 and 60 bits, scale 2^40, public keys and all rotations; its row is
left out where `pip install tenseal` was not run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.options import Options
from benchmarks.results import format_cell, print_table
from benchmarks.swarms import torch_threads
from nesa_node.privacy.ciphertext import RotationKeys
from nesa_node.privacy.encrypted_product import (
    EncodedMatrix,
    encode_matrix,
    multiply,
    required_rotations,
)
from nesa_node.privacy.layout import plan_layout
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.ring import Residues, Ring
from nesa_node.privacy.secret_key import SecretKey

DEFAULTS = Options(threads=(1,), runs=5)
QUICK = Options(model="tiny", threads=(1,), runs=1)

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shape:
    """Products of one input each, as (outputs, inputs)."""

    name: str
    products: tuple[tuple[int, int], ...]
    layers: int

    @property
    def weights(self) -> int:
        return sum(outputs * inputs for outputs, inputs in self.products)


SHAPES = {
    "tiny": [Shape("64 x 64", ((64, 64),), 1)],
    "published": [
        Shape("2048 x 2048", ((2048, 2048),), 1),
        Shape("layer of SmolLM2-135M", ((960, 576), (576, 576), (3072, 576), (576, 1536)), 30),
        Shape(
            "layer of TinyLlama-1.1B", ((2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632)), 22
        ),
    ],
}


def run(options: Options) -> list[dict[str, Any]]:
    shapes = SHAPES["tiny" if options.model == "tiny" else "published"]
    with torch_threads(options.threads[0]):
        ring = make_ring(RingParameters(), options.threads[0])
        rows = [_measure_transforms(ring, options)]
        rows += [measure(ring, shape, options) for shape in shapes]
        rows += _measure_tenseal(shapes[0], options)
    show(rows)
    return rows


def measure(ring: Ring, shape: Shape, options: Options) -> dict[str, Any]:
    rng = np.random.default_rng(options.seed)
    key = SecretKey(ring)
    layouts = [plan_layout(*each, ring.parameters.slots) for each in shape.products]
    halves = {steps: key.rotation_key(steps) for steps in required_rotations(layouts)}
    keys = RotationKeys(key.rotation_seed, halves).expand(ring)
    weights = [rng.normal(0, 0.02, each) for each in shape.products]
    started = time.perf_counter()
    matrices = [
        encode_matrix(ring, layout, weight) for layout, weight in zip(layouts, weights, strict=True)
    ]
    encode_s = time.perf_counter() - started
    drawn = [
        [sample_input(rng, each.shape[1]) for each in weights] for _ in range(options.runs + 1)
    ]
    runs = [_run_once(ring, key, keys, matrices, weights, inputs) for inputs in drawn][
        1:
    ]  # the first one touches all memory once
    primes = ring.parameters.prime_bits
    chunks = sum(len(each.chunks) for each in layouts)
    blocks = sum(len(each.blocks) for each in layouts)
    sent = chunks * ring.degree * sum(primes[:-1]) // 8
    received = blocks * 2 * ring.degree * sum(primes[:2]) // 8
    return {
        "what": shape.name,
        "node_s": median(each["node_s"] for each in runs),
        "client_s": median(each["client_s"] for each in runs),
        "error": max(each["error"] for each in runs),
        "encode_s": encode_s,
        "weight_bytes": sum(each.nbytes(len(primes)) for each in layouts) / shape.weights,
        "key_bytes": len(keys) * (len(primes) - 1) * ring.degree * sum(primes) // 8,
        "sent_bytes": sent,
        "received_bytes": received,
        "token_bytes": shape.layers * (sent + received),
        "runs": runs,
    }


def sample_input(rng: np.random.Generator, count: int) -> Matrix:
    x = rng.normal(size=count)
    x[count // 3] = 200.0
    return x


def _run_once(
    ring: Ring,
    key: SecretKey,
    keys: dict[int, Residues],
    matrices: Iterable[EncodedMatrix],
    weights: Iterable[Matrix],
    inputs: Iterable[Matrix],
) -> dict[str, float]:
    node_s = client_s = error = 0.0
    for matrix, weight, x in zip(matrices, weights, inputs, strict=True):
        largest = np.abs(x).max()
        started = time.perf_counter()
        fresh = [key.encrypt(slots) for slots in matrix.layout.pack(x / largest)]
        encrypted = time.perf_counter()
        results = multiply(ring, matrix, [each.expand(ring) for each in fresh], keys)
        multiplied = time.perf_counter()
        decrypted = [key.decrypt(each, matrix.scale) for each in results]
        y = matrix.layout.unpack(decrypted) * largest
        client_s += time.perf_counter() - multiplied + encrypted - started
        node_s += multiplied - encrypted
        expected = weight @ x
        error = max(error, float(np.abs(y - expected).max() / np.abs(expected).max()))
    return {"node_s": node_s, "client_s": client_s, "error": error}


def _measure_transforms(ring: Ring, options: Options) -> dict[str, Any]:
    rows = np.zeros((16, len(ring.primes), ring.degree), np.uint32)
    runs = [time_call(lambda: ring.values(rows)) for _ in range(10 * options.runs)]
    return {"what": "transform", "node_s": median(runs) / (16 * len(ring.primes)), "runs": runs}


def _measure_tenseal(shape: Shape, options: Options) -> list[dict[str, Any]]:
    try:
        import tenseal  # type: ignore[import-untyped, import-not-found, unused-ignore]  # no types
    except ImportError:
        return []
    (outputs, inputs), *_ = shape.products
    rng = np.random.default_rng(options.seed)
    weight, x = rng.normal(0, 0.02, (outputs, inputs)), sample_input(rng, inputs)
    context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 40, 40, 60], n_threads=1
    )
    context.global_scale = 2.0**40
    context.generate_galois_keys()
    given = weight.T.tolist()
    runs = []
    for _ in range(min(options.runs, 3)):
        vector = tenseal.ckks_vector(context, x.tolist())
        started = time.perf_counter()
        product = vector.mm(given)
        runs.append(time.perf_counter() - started)
        found = np.array(product.decrypt())
    expected = weight @ x
    return [
        {
            "what": f"{shape.name}, TenSEAL",
            "node_s": median(runs),
            "error": float(np.abs(found - expected).max() / np.abs(expected).max()),
            "sent_bytes": len(vector.serialize()),
            "received_bytes": len(product.serialize()),
            "runs": runs,
        }
    ]


def time_call(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def show(rows: list[dict[str, Any]]) -> None:
    print_table(
        "Products with encrypted vectors",
        "what|node\nms|client\nms|error of\nlargest|bytes per\nweight|encoding\ns|sent\nKB|"
        "received\nKB|all layers\nMB",
        [
            [
                row["what"],
                format_cell(row, "node_s", "{:.3f}", 1e3),
                format_cell(row, "client_s", "{:.1f}", 1e3),
                format_cell(row, "error", "{:.1e}"),
                format_cell(row, "weight_bytes", "{:.1f}"),
                format_cell(row, "encode_s", "{:.1f}"),
                format_cell(row, "sent_bytes", "{:.0f}", 1e-3),
                format_cell(row, "received_bytes", "{:.0f}", 1e-3),
                format_cell(row, "token_bytes", "{:.1f}", 1e-6),
            ]
            for row in rows
        ],
    )
