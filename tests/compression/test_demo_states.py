"""What codecs do to a real model: its perplexity, sizes of its hidden states, its tokens.

The codec is applied at all four boundaries of a chain of three nodes (what the client embeds, what
blocks 10, 20 and 30 put out), in transformers' own model, in messages of one text window. The texts
are the prose of Python's own manual, which every CPython carries (`pydoc_data.topics`), and for
perplexities also the King James Bible, where it is installed.

Legend: L tokens, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from nesa_node.compression.tensors import decode, encode
from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.declaration import default_cache_dir
from nesa_node.engine.weights.demo_model import demo_model_path
from nesa_node.evaluation.tasks import BIBLE, read_text
from tests.compression.error_bounds import error_bound

WINDOW = 1024
WINDOWS = 4
BOUNDARIES = (10, 20)
Change = Callable[[Tensor], Tensor]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Demo:
    """The demo model with something done to its hidden states between nodes."""

    def __init__(self, model: Any, windows_WL: Tensor) -> None:
        self.model = model
        self.windows_WL = windows_WL

    @contextmanager
    def changed(self, change: Change) -> Iterator[None]:
        def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if given:
                return (change(given[0]), *given[1:]), named
            return given, named | {"hidden_states": change(named["hidden_states"])}

        inner = self.model.model
        places = [inner.layers[0], *(inner.layers[at] for at in BOUNDARIES), inner.norm]
        hooks = [place.register_forward_pre_hook(before, with_kwargs=True) for place in places]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.inference_mode()
    def perplexity(self, change: Change, windows: int = WINDOWS) -> float:
        loss = 0.0
        with self.changed(change):
            for tokens_L in self.windows_WL[:windows]:
                logits_LV = self.model(tokens_L[None, :-1]).logits[0]
                loss += torch.nn.functional.cross_entropy(logits_LV, tokens_L[1:]).item()
        return math.exp(loss / windows)

    @torch.inference_mode()
    def states(self) -> list[Tensor]:
        """[L, D] float32 of each boundary, for the first window."""
        kept: list[Tensor] = []

        def keep(hidden: Tensor) -> Tensor:
            kept.append(hidden[0].clone())
            return hidden

        with self.changed(keep):
            self.model(self.windows_WL[:1])
        return kept


@dataclass(frozen=True)
class Reader:
    """The demo model with a text, and the perplexity that this has without codecs."""

    demo: Demo
    plain: float


def windows(text: str) -> Tensor:
    """[W, L]: the text's first tokens."""
    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(demo_model_path(default_cache_dir()))
    tokens = tokenizer(text[:60_000], verbose=False)["input_ids"][: WINDOWS * WINDOW]
    return torch.tensor(tokens).view(WINDOWS, WINDOW)


def through(codec: str) -> Change:
    """A message from one node to the next."""

    def change(hidden_1LD: Tensor) -> Tensor:
        hidden_LD = hidden_1LD[0]
        meta, payload = encode(hidden_LD, codec=codec)
        return decode(meta, bytes(payload), max_bytes=hidden_LD.nbytes + 64)[None]

    return change


@pytest.fixture(scope="module")
def demo() -> Demo:
    folder = demo_model_path(default_cache_dir())
    auto_model: Any = AutoModelForCausalLM
    model = auto_model.from_pretrained(folder, dtype=torch.float32).eval()
    text = "\n".join(sorted(topics.values(), key=len, reverse=True))
    return Demo(model, windows(text))


@pytest.fixture(scope="module", params=["manual", BIBLE])
def reader(request: pytest.FixtureRequest, demo: Demo) -> Reader:
    if request.param == BIBLE:
        try:
            demo = Demo(demo.model, windows(read_text(BIBLE)))
        except ConfigError as error:
            pytest.skip(str(error))
    return Reader(demo, demo.perplexity(lambda hidden: hidden))


@pytest.mark.parametrize(
    ("codec", "percent"), [("blockwise8", 0.5), ("int8", 0.2), ("int4", 2.0), ("bfloat16", 0.2)]
)
def test_perplexity_hardly_changes(reader: Reader, codec: str, percent: float) -> None:
    changed = reader.demo.perplexity(through(codec))
    change = 100 * (changed / reader.plain - 1)
    print(f"{codec}: perplexity {reader.plain:.3f} -> {changed:.3f}, {change:+.3f} %")
    assert abs(change) < percent


def test_int4_keeps_its_margin_in_messages_of_one_token(reader: Reader) -> None:
    def each(hidden_1LD: Tensor) -> Tensor:
        rows = [through("int4")(row_LD[None, None]) for row_LD in hidden_1LD[0]]
        return torch.cat(rows, dim=1)

    changed = reader.demo.perplexity(each, windows=1)
    plain = reader.demo.perplexity(lambda hidden: hidden, windows=1)
    print(f"int4 by token: perplexity {plain:.3f} -> {changed:.3f}")
    assert abs(changed / plain - 1) < 0.03


def test_massive_activations_are_there_and_spoil_little(demo: Demo) -> None:
    after_20_LD = demo.states()[2]
    largest_L = after_20_LD.abs().amax(-1)
    assert largest_L[0] > 1000 * after_20_LD.abs().median()
    typical_LD = after_20_LD.abs() < 20 * after_20_LD.abs().median(-1, keepdim=True).values
    for codec, worst in (("blockwise8", 0.05), ("int8", 0.1), ("int4", 0.1)):
        error_LD = (through(codec)(after_20_LD[None])[0] - after_20_LD) * typical_LD
        relative_L = error_LD.norm(dim=-1) / (after_20_LD * typical_LD).norm(dim=-1)
        assert relative_L.max() < worst, codec


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.bfloat16, 0.75), (torch.float32, 0.88)])
def test_lossless_shrinks_real_hidden_states(demo: Demo, dtype: torch.dtype, ratio: float) -> None:
    # What is embedded repeats itself; blocks' outputs do not.
    for state_LD in demo.states()[1:]:
        hidden_LD = state_LD.to(dtype)
        meta, payload = encode(hidden_LD, codec="lossless")
        assert torch.equal(decode(meta, payload, max_bytes=hidden_LD.nbytes + 64), hidden_LD)
        print(f"lossless, {dtype}: {payload.nbytes / hidden_LD.nbytes:.3f}")
        assert payload.nbytes <= ratio * hidden_LD.nbytes


def test_lossless_gives_identical_tokens(demo: Demo) -> None:
    prompt_1L = demo.windows_WL[:1, :64]
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = demo.model.generate(prompt_1L, **options)
    with demo.changed(through("lossless")):
        assert torch.equal(demo.model.generate(prompt_1L, **options), expected)


def test_real_hidden_states_stay_within_the_bounds(demo: Demo) -> None:
    for state_LD in demo.states():
        for codec in ("blockwise8", "int8", "int4", "bfloat16", "float16"):
            for dtype in (torch.float32, torch.bfloat16):
                hidden_LD = state_LD.to(dtype)
                back_LD = through(codec)(hidden_LD[None])[0]
                error_LD = (back_LD.double() - hidden_LD.double()).abs()
                assert bool((error_LD <= error_bound(hidden_LD, codec=codec)).all())
