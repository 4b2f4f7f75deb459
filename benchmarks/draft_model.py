"""Distil a small draft model from a model's own answers.

    python -m benchmarks.draft_model demo OUT --minutes 20

The draft has the model's embedding and head, which stay as they are, and some of its blocks, which
are trained on answers that the model gave: at each position towards what its head gets there, and
its distribution of next tokens. `nesa-node generate MODEL --draft OUT` uses it, as `--draft auto`
does in a folder `draft` inside the model's.

"Distilling the Knowledge in a Neural Network" (Hinton et al., 2015), equation 1 at temperature 1,
over the `TEACHER_TOKENS` likeliest tokens and the rest as one.

B rows, L columns, T positions that are not padding, D hidden, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.models import quiet_transformers
from nesa_node.core.settings.declaration import default_cache_dir
from nesa_node.engine.weights.demo_model import demo_model_path

TEACHER_TOKENS = 16
HEAD_SHARE = 0.25
TEACHER_SHARE = 0.4
"""Share of the time in which the model answers; the rest is training."""
LEARNING_RATE = 6e-4
HELD_OUT = 1
"""Batches of answers that are not trained on."""

TOPICS = (
    "the seasons", "photosynthesis", "a lighthouse", "prime numbers", "the Roman empire", "bread",
    "volcanoes", "chess", "the water cycle", "bicycles", "electric motors", "a museum in Paris",
    "jazz", "honey bees", "the printing press", "tides", "a long train journey", "sorting",
    "black holes", "gardening", "a small bakery", "the human heart", "rivers", "maps", "football",
    "learning a language", "coffee", "earthquakes", "the moon landing", "a rainy day", "databases",
    "recycling", "whales", "the history of writing", "solar panels", "a mountain village",
)  # fmt: skip
REQUESTS = (
    "Explain {} to a child.", "Write a short story about {}.", "List five facts about {}.",
    "What should I know about {}?", "Give me three questions about {} and answer them.",
    "Write a poem about {}.", "Compare {} with {}.", "Summarize what is known about {}.",
    "Write a letter to a friend about {}.", "What is important about {}, and why?",
)  # fmt: skip
CODE_TOPICS = (
    "reverses a string", "counts the words of a text", "finds the largest number of a list",
    "checks whether a number is prime", "sorts a list of pairs by the second item",
    "reads a file line by line", "computes the Fibonacci numbers", "merges two sorted lists",
    "removes duplicates from a list", "finds the common elements of two lists",
    "converts Celsius to Fahrenheit", "draws a triangle of stars", "parses a date",
    "computes the mean and the median", "implements a stack as a class", "searches a binary tree",
)  # fmt: skip
CODE_REQUESTS = (
    "Write a Python function that {}.", "Write a JavaScript function that {}.",
    "Write a Python program that {}, with comments.", "Show me code in C that {}.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TaughtBatch:
    """Texts [B, L], and what the model says of each next token."""

    ids_BL: torch.Tensor
    mask_BL: torch.Tensor
    hidden_BLD: torch.Tensor
    """What the head gets, in float16."""
    likely_BLK: torch.Tensor
    """Ids of the likeliest next tokens."""
    chances_BLK: torch.Tensor

    def select(self, rows: torch.Tensor) -> TaughtBatch:
        return TaughtBatch(*(getattr(self, field.name)[rows] for field in fields(self)))


def make_prompts(rng: random.Random) -> Iterator[str]:
    """Requests without end: talk, code, and summaries of the files beside this one."""
    paragraphs = [
        text.strip()
        for file in sorted(Path(__file__).parents[1].glob("docs/*.md"))
        for text in file.read_text(encoding="utf-8").split("\n\n")
        if 200 < len(text) < 900 and "|" not in text
    ]
    while True:
        kind = rng.random()
        if kind < 0.5:
            yield rng.choice(REQUESTS).format(rng.choice(TOPICS), rng.choice(TOPICS))
        elif kind < 0.8:
            yield rng.choice(CODE_REQUESTS).format(rng.choice(CODE_TOPICS))
        else:
            yield f"Summarize this text:\n\n{rng.choice(paragraphs)}"


@torch.no_grad()
def ask_teacher(
    teacher: Any, tokenizer: Any, prompts: Sequence[str], answer_tokens: int, seed: int
) -> TaughtBatch:
    """Answers to `prompts`, half of them greedy, with the distributions along them."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in prompts
    ]
    encoded = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
    )
    torch.manual_seed(seed)
    ids_BL = teacher.generate(
        **encoded,
        max_new_tokens=answer_tokens,
        do_sample=bool(seed % 2),
        **({"temperature": 0.7, "top_k": 0} if seed % 2 else {"temperature": None}),
        top_p=None,
        pad_token_id=tokenizer.pad_token_id or 0,
    )
    answer_BL = torch.ones_like(ids_BL[:, encoded["input_ids"].shape[1] :])
    mask_BL = torch.cat([encoded["attention_mask"], answer_BL], 1)
    hidden_BLD = teacher.model(ids_BL, attention_mask=mask_BL).last_hidden_state
    logits_BLV = teacher.lm_head(hidden_BLD)
    likely = logits_BLV.topk(TEACHER_TOKENS)
    total_BL1 = logits_BLV.logsumexp(-1, keepdim=True)
    chances_BLK = (likely.values - total_BL1).exp()
    return TaughtBatch(ids_BL, mask_BL, hidden_BLD.half(), likely.indices, chances_BLK)


def make_student(teacher: Any, layers: Sequence[int]) -> Any:
    """A model of some of the teacher's blocks; only these are trained."""
    config = type(teacher.config).from_dict(teacher.config.to_dict())
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    auto: Any = AutoModelForCausalLM
    student = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    own, known = student.state_dict(), teacher.state_dict()
    for name in own:
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            parts[at] = str(layers[int(parts[at])])
        own[name] = known[".".join(parts)].clone()
    student.load_state_dict(own)
    student.requires_grad_(False)
    student.model.layers.requires_grad_(True)
    student.model.norm.requires_grad_(True)
    return student


def distillation_loss(student: Any, batch: TaughtBatch, rng: random.Random) -> torch.Tensor:
    """Of hidden states at all positions, and of distributions at some of them.

    The first is the square of the error, relative to the teacher's; the second the cross entropy
    with the teacher's distribution, the tokens beyond K as one. The head, which does not change, is
    most of the work: it runs at `HEAD_SHARE` of the positions.
    """
    hidden_BLD = student.model(batch.ids_BL, attention_mask=batch.mask_BL).last_hidden_state
    seen_BL = batch.mask_BL != 0
    ours_TD, theirs_TD = hidden_BLD[seen_BL], batch.hidden_BLD[seen_BL].float()
    errors_T = (ours_TD - theirs_TD).square().mean(-1) / theirs_TD.square().mean(-1)
    count = max(int(HEAD_SHARE * len(ours_TD)), 1)
    picked = torch.tensor(rng.sample(range(len(ours_TD)), count))
    logs_TV = student.lm_head(ours_TD[picked]).log_softmax(-1)
    chances_TK = batch.chances_BLK[seen_BL][picked]
    logs_TK = logs_TV.gather(-1, batch.likely_BLK[seen_BL][picked])
    rest_T = (1 - chances_TK.sum(-1)).clamp_min(0)
    others_T = (1 - logs_TK.exp().sum(-1)).clamp_min(1e-6).log()
    losses_T = -(chances_TK * logs_TK).sum(-1) - rest_T * others_T
    loss: torch.Tensor = errors_T.mean() + losses_T.mean()
    return loss


@torch.no_grad()
def agreement(student: Any, batch: TaughtBatch, answer_tokens: int) -> float:
    """Share of positions of the answers at which the likeliest tokens of both are the same."""
    best_BL = student(batch.ids_BL, attention_mask=batch.mask_BL).logits.argmax(-1)
    same_BL = best_BL == batch.likely_BLK[..., 0]
    return float(same_BL[:, -answer_tokens:-1].float().mean())


def distil(
    source: Path,
    out: Path,
    layers: Sequence[int],
    minutes: float,
    *,
    batch_rows: int,
    answer_tokens: int,
    seed: int,
) -> float:
    """Train, write the draft model to `out`, and return its agreement on answers held out."""
    auto: Any = AutoModelForCausalLM
    tokenizers: Any = AutoTokenizer
    with quiet_transformers():
        teacher = auto.from_pretrained(
            source, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        ).eval()
        tokenizer = tokenizers.from_pretrained(
            source, local_files_only=True, trust_remote_code=False
        )
    student = make_student(teacher, layers)
    rng = random.Random(seed)
    prompts = make_prompts(rng)
    began = time.monotonic()
    taught: list[TaughtBatch] = []
    while time.monotonic() - began < 60 * minutes * TEACHER_SHARE or len(taught) <= HELD_OUT:
        asked = list(itertools.islice(prompts, batch_rows))
        taught.append(ask_teacher(teacher, tokenizer, asked, answer_tokens, seed + len(taught)))
        print(
            f"{len(taught) * batch_rows} answers after {time.monotonic() - began:.0f} s", flush=True
        )
    held_out, taught = taught[:HELD_OUT], taught[HELD_OUT:]
    trained = [weights for weights in student.parameters() if weights.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.01)
    print(f"agreement before: {agreement(student, held_out[0], answer_tokens):.1%}", flush=True)
    train_began, until = time.monotonic(), began + 60 * minutes
    step, shown = 0, 0.0
    while (now := time.monotonic()) < until or not step:
        done = (now - train_began) / max(until - train_began, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * max(1.0 - done, 0.02)
        batch = rng.choice(taught)
        rows = torch.tensor(rng.sample(range(batch_rows), max(batch_rows // 2, 1)))
        loss = distillation_loss(student, batch.select(rows), rng)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        step += 1
        if now - shown > 30:
            shown = now
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)
    found = agreement(student, held_out[0], answer_tokens)
    save(student, source, out)
    return found


def save(student: Any, source: Path, out: Path) -> None:
    """Write the draft in bfloat16: a decode step reads half as much."""
    student.to(torch.bfloat16).save_pretrained(out)
    for file in source.glob("token*"):
        shutil.copy(file, out)
    for name in ("special_tokens_map.json", "vocab.json", "merges.txt"):
        if (source / name).is_file():
            shutil.copy(source / name, out)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft_model")
    parser.add_argument("model", help="`demo`, or the folder of a Llama or a model built like one")
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--layers", default="0,1,2,-1", help="blocks to begin with")
    parser.add_argument("--batch-rows", type=int, default=16, help="answers that are given at once")
    parser.add_argument("--answer-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    source = demo_model_path(default_cache_dir()) if given.model == "demo" else Path(given.model)
    blocks = int(
        AutoConfig.from_pretrained(
            source, local_files_only=True, trust_remote_code=False
        ).num_hidden_layers
    )
    layers = [int(text) % blocks for text in given.layers.split(",")]
    found = distil(
        source,
        given.out,
        layers,
        given.minutes,
        batch_rows=given.batch_rows,
        answer_tokens=given.answer_tokens,
        seed=given.seed,
    )
    print(f"{given.out}: blocks {layers}, agreement on answers held out {found:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
