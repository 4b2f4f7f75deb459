"""Other programs that run the same model here, for comparison, where they are installed.

llama.cpp is what a single process without Python's overhead can do; it runs a GGUF file that is
written from the same weights. Petals pins another transformers, so that it cannot be installed
beside this project and is not run.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.figures import median_ratio
from benchmarks.generation import Generation, generate
from benchmarks.models import random_prompt
from benchmarks.options import Options
from benchmarks.results import print_table

_CONTEXT = 1024
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTER_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def measure_others(local: Any, options: Options) -> list[dict[str, Any]]:
    """A row for llama.cpp, or none and a word why."""
    missing = [name for name in ("llama_cpp", "gguf") if find_spec(name) is None]
    if missing or local.config.model_type != "llama":
        why = f"{missing[0]} is not installed" if missing else "not a Llama"
        print(f"llama.cpp: {why}, skipped")
        return []
    prompt = random_prompt(local, options.prompt_tokens, options.seed)
    with open_llama_cpp(local, options) as llama:
        runs = []
        for _ in range(options.runs + 1):
            alone = generate(local, prompt, options.new_tokens)
            theirs = generate_llama_cpp(llama, prompt[0].tolist(), options.new_tokens)
            runs.append({"local": alone, "llama.cpp": theirs})
    runs = runs[1:]  # the first one touches all memory
    seconds = {who: [run[who].seconds for run in runs] for who in runs[0]}
    row = {
        "other": "llama.cpp",
        "tokens_per_s": options.new_tokens / median(seconds["llama.cpp"]),
        "local_tokens_per_s": options.new_tokens / median(seconds["local"]),
        "ratio": median_ratio(seconds["local"], seconds["llama.cpp"]),
        "tokens_equal": all(run["local"].tokens == run["llama.cpp"].tokens for run in runs),
        "runs": [{who: one.as_json() for who, one in run.items()} for run in runs],
    }
    show(row, options)
    return [row]


def generate_llama_cpp(llama: Any, prompt: list[int], new_tokens: int) -> Generation:
    """Greedy, as `generate` does for a transformers model."""
    tokens, times = [], []
    llama.reset()
    started = time.perf_counter()
    for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True):
        tokens.append(int(token))
        times.append(time.perf_counter())
        if len(tokens) == new_tokens:
            break
    return Generation(tuple(tokens), started, tuple(times), time.perf_counter())


@contextmanager
def open_llama_cpp(local: Any, options: Options) -> Iterator[Any]:
    """The same model in llama.cpp, with one thread."""
    llama_cpp = importlib.import_module("llama_cpp")
    with TemporaryDirectory(prefix="nesa-bench-gguf-") as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(local, path, options)
        llama = llama_cpp.Llama(
            str(path), n_ctx=_CONTEXT, n_threads=1, n_threads_batch=1, verbose=False
        )
        try:
            yield llama
        finally:
            llama.close()


def write_gguf(local: Any, path: Path, options: Options) -> None:
    """The weights of a Llama as llama.cpp reads them; without a vocabulary."""
    gguf = importlib.import_module("gguf")
    config = local.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType["BF16" if options.dtype == "bfloat16" else "F32"]
    for name, tensor in local.state_dict().items():
        values = rotated(name, tensor, config).float().numpy()
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """The name of a Llama's weight in GGUF."""
    module = name.removesuffix(".weight")
    if module in _OUTER_NAMES:
        return f"{_OUTER_NAMES[module]}.weight"
    number, rest = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{number}.{_LAYER_NAMES[rest]}.weight"


def rotated(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp rotates neighbouring pairs of a head's outputs, transformers halves of it."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    rows, columns = weight.shape
    halves = weight.view(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def show(row: dict[str, Any], options: Options) -> None:
    cells = (
        row["other"],
        f"{row['tokens_per_s']:.1f}",
        f"{row['local_tokens_per_s']:.1f}",
        f"{row['ratio']:.2f}",
        "yes" if row["tokens_equal"] else "NO",
    )
    print_table("one thread, no swarm", "|tokens/s|local|ratio|equal", [cells])
