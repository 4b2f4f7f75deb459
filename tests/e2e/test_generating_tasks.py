"""Answers, translations, summaries and captions over nodes that hold pieces."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nesa_node import RemoteNetwork, SwarmPipeline
from nesa_node.client.graphs.graph_connection import GraphConnection
from nesa_node.client.graphs.remote_generation import make_generator
from nesa_node.core.errors import ConfigError, UnsupportedFeatureError, UnsupportedModelError
from nesa_node.core.ids import Span
from nesa_node.engine.graphs import model_graph
from nesa_node.server.graphs.served_pieces import ServedPieces
from tests.e2e.test_tasks import (
    BERT,
    SIZE,
    TEXTS,
    VISION,
    WORDS,
    Case,
    in_pieces,
    picture,
    serving,
)
from tests.swarms import in_process_swarm

HF: Any = transformers
SPECIAL = list(range(5))
SEQ: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
    "init_std": 0.6,
}
CASES = [
    Case(
        "translation",
        "MarianMTModel",
        lambda: HF.MarianConfig(**SEQ, forced_eos_token_id=None),
        options={
            "max_new_tokens": 12,
            "num_beams": 2,
            "suppress_tokens": SPECIAL,
            "no_repeat_ngram_size": 2,
        },
    ),
    Case(
        "summarization",
        "BartForConditionalGeneration",
        lambda: HF.BartConfig(**SEQ, forced_eos_token_id=None),
        options={
            "max_new_tokens": 12,
            "num_beams": 1,
            "suppress_tokens": SPECIAL,
            "no_repeat_ngram_size": 2,
        },
        pieces=2,
    ),
    Case(
        "translation_en_to_fr",
        "T5ForConditionalGeneration",
        lambda: HF.T5Config(
            vocab_size=len(WORDS),
            d_model=32,
            d_kv=8,
            initializer_factor=8.0,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            eos_token_id=3,
            decoder_start_token_id=0,
            task_specific_params={
                "translation_en_to_fr": {
                    "prefix": "model of ",
                    "max_new_tokens": 9,
                    "suppress_tokens": SPECIAL,
                }
            },
        ),
        pieces=5,
    ),
]


@torch.no_grad()
def generate_alone(case: Case, folder: Path, texts: list[str], **options: Any) -> list[str]:
    model = getattr(HF, case.model).from_pretrained(folder).eval()
    tokenizer = HF.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    made = model.generate(**tokens, **options)
    found: list[str] = tokenizer.batch_decode(made, skip_special_tokens=True)
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", in_pieces(CASES))
def test_texts_are_those_of_the_whole_model(
    case: Case, tmp_path: Path, visited: list[Span]
) -> None:
    with serving(case, tmp_path) as (folder, addresses):
        specific = getattr(case.config(), "task_specific_params", {})
        asked = {"prefix": "", **specific.get(case.task, {})}
        prefix = asked.pop("prefix")
        expected = generate_alone(
            case, folder, [prefix + text for text in TEXTS], **asked, **case.options
        )
        with SwarmPipeline(case.task, folder, initial_peers=addresses) as remote:
            found = remote(TEXTS, **case.options)
            assert len(visited) > 4, "several tokens were asked for"
            assert [list(each.values()) for each in found] == [[text] for text in expected]
            assert len(set(expected)) == len(TEXTS)
            first = [each.start for each in visited].count(0)
            assert first == 1, "the first piece, of the encoder, runs once for all tokens"
            with pytest.raises(ConfigError, match="a text is empty"):
                remote("  ")
            if case.task.startswith("translation"):
                with pytest.raises(ConfigError, match="knows no language 'xx'"):
                    remote("nodes", tgt_lang="xx")
            with pytest.raises(ConfigError, match="leave out use_cache=True"):
                remote("nodes", use_cache=True, max_new_tokens=4)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("routing", ["chain", "star"])
def test_nodes_compute_each_token_once(
    routing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[1]
    computed: list[tuple[int, int]] = []
    run = ServedPieces.run

    def note(self: ServedPieces, span: Span, sizes: Any, *args: Any) -> Any:
        ids = self.network._inputs["decoder_input_ids"]
        assert ids is not None
        tokens = self.network.find_shape(ids, sizes).shape[1]
        if len(args) > 1 and args[1] is not None:  # a sequence
            computed.append((self.network.find_position(sizes), tokens))
        return run(self, span, sizes, *args)

    monkeypatch.setattr(ServedPieces, "run", note)
    plans: list[int] = []
    plan_hops = GraphConnection._plan_hops

    async def count(self: GraphConnection) -> Any:
        plans.append(len(computed))
        return await plan_hops(self)

    monkeypatch.setattr(GraphConnection, "_plan_hops", count)
    options = {**case.options, "max_new_tokens": 20}
    with serving(case, tmp_path) as (folder, addresses):
        expected = generate_alone(case, folder, TEXTS, **options)
        with RemoteNetwork.from_pretrained(
            folder, initial_peers=addresses, routing=routing
        ) as network:
            tokenizer = HF.AutoTokenizer.from_pretrained(folder)
            given = tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False)
            for _ in range(2):
                computed.clear()
                plans.clear()
                generator: Any = make_generator(network)
                made = generator.generate(**given, **options)
                assert tokenizer.batch_decode(made, skip_special_tokens=True) == expected
                steps = made.shape[1] - 1
                assert {each for each in computed if each[0]} == {
                    (position, 1) for position in range(1, steps)
                }
                assert {each for each in computed if not each[0]} == {(0, 1)}
                assert max(plans) <= computed.index((1, 1)), "further tokens go to the same nodes"


def test_captions_are_those_of_the_whole_model(tmp_path: Path) -> None:
    case = Case(
        "image-to-text",
        "VisionEncoderDecoderModel",
        lambda: HF.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            HF.ViTConfig(**VISION),
            HF.GPT2Config(vocab_size=len(WORDS), n_embd=32, n_layer=2, n_head=2, n_positions=64),
            decoder_start_token_id=2,
            pad_token_id=0,
            eos_token_id=3,
        ),
        lambda: HF.ViTImageProcessorPil(size=SIZE),
    )
    with serving(case, tmp_path) as (folder, addresses):
        model = HF.VisionEncoderDecoderModel.from_pretrained(folder).eval()
        pixels = case.processor and case.processor()(picture(), return_tensors="pt").pixel_values
        with torch.no_grad():
            made = model.generate(pixel_values=pixels, max_new_tokens=12, num_beams=3)
        tokenizer = HF.AutoTokenizer.from_pretrained(folder)
        (expected,) = tokenizer.batch_decode(made, skip_special_tokens=True)
        path = tmp_path / "picture.png"
        picture().save(path)
        with SwarmPipeline(case.task, folder, initial_peers=addresses) as remote:
            options = {"max_new_tokens": 12, "num_beams": 3}
            assert remote(str(path), **options) == [{"generated_text": expected}]
            assert remote([picture()] * 2, **options) == [[{"generated_text": expected}]] * 2
            assert expected
            with pytest.raises(ConfigError, match="cannot be read as a picture"):
                remote(str(folder / "config.json"))
        with pytest.raises(UnsupportedModelError, match="does not use for translation"):
            SwarmPipeline("translation", folder, initial_peers=addresses)


QUESTION = Case(
    "question-answering", "BertForQuestionAnswering", lambda: HF.BertConfig(**BERT), pieces=5
)
CONTEXT = "nodes hold blocks of a model a model of blocks hold nodes of a model"


@torch.no_grad()
def answer_alone(folder: Path, question: str, context: str, longest: int) -> dict[str, Any]:
    """The best answer of all spans of tokens, each tried."""
    model = HF.BertForQuestionAnswering.from_pretrained(folder).eval()
    tokenizer = HF.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
    offsets = tokens.pop("offset_mapping")[0].tolist()
    output = model(**tokens)
    places = [at for at, part in enumerate(tokens.sequence_ids(0)) if part == 1]
    weighed = [0, *places]
    start = dict(zip(weighed, output.start_logits[0, weighed].softmax(0).tolist(), strict=True))
    end = dict(zip(weighed, output.end_logits[0, weighed].softmax(0).tolist(), strict=True))
    pairs = itertools.product(places, places)
    spans = [(one, other) for one, other in pairs if one <= other < one + longest]
    first, last = max(spans, key=lambda span: start[span[0]] * end[span[1]])
    text = context[offsets[first][0] : offsets[last][1]]
    return {
        "score": start[first] * end[last],
        "start": offsets[first][0],
        "end": offsets[last][1],
        "answer": text,
    }


def test_answers_are_those_of_all_spans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(QUESTION, tmp_path) as (folder, addresses):
        with SwarmPipeline(QUESTION.task, folder, initial_peers=addresses) as remote:
            for longest in (1, 3, 15):
                expected = answer_alone(folder, "hold a model", CONTEXT, longest)
                found = remote(question="hold a model", context=CONTEXT, max_answer_len=longest)
                assert found == {**expected, "score": pytest.approx(expected["score"], abs=1e-5)}
            best = remote(question="hold a model", context=CONTEXT, top_k=3)
            assert best[0] == found
            assert best[0]["score"] > best[1]["score"] > best[2]["score"]
            both = remote({"question": ["nodes", "a model"], "context": CONTEXT})
            assert both[1] == remote(question="a model", context=CONTEXT)
            in_parts = remote(
                question="a model", context=f"{CONTEXT} {CONTEXT}", max_seq_len=16, doc_stride=4
            )
            whole = f"{CONTEXT} {CONTEXT}"
            assert whole[in_parts["start"] : in_parts["end"]] == in_parts["answer"] != ""
            maybe_none = remote(
                question="a", context=CONTEXT, handle_impossible_answer=True, top_k=50
            )
            assert "" in [each["answer"] for each in maybe_none]
            for wrong, reason in (
                ({"question": "a"}, "needs a context"),
                ({"question": "", "context": "b"}, "is empty"),
                ({"question": "a", "context": "b", "top_k": 0}, "at least 1"),
                ({"question": "a " * 40, "context": "b"}, "the question has 42 tokens"),
                ({"question": ["a", "b"], "context": ["c"] * 3}, "2 questions and 3 contexts"),
            ):
                with pytest.raises(ConfigError, match=reason):
                    remote(**wrong)
        command = ["task", QUESTION.task, CONTEXT, "--model", str(folder), "--json"]
        peers = ["--initial-peers", addresses[0], "--question", "hold a model"]
        run = subprocess.run(
            [sys.executable, "-m", "nesa_node", *command, *peers], capture_output=True, check=True
        )
        (answered,) = json.loads(run.stdout)
        assert answered["answer"][0]["answer"] == found["answer"]


@torch.no_grad()
def test_models_that_are_captured_without_a_cache(
    tmp_path: Path, visited: list[Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise UnsupportedFeatureError("as ProphetNet")

    monkeypatch.setattr(model_graph, "capture_with_cache", refuse)
    torch.manual_seed(0)
    model = HF.BartForConditionalGeneration(HF.BartConfig(**SEQ)).eval()
    model.save_pretrained(tmp_path / "model")
    ids = torch.randint(5, len(WORDS), (2, 7))
    options: dict[str, Any] = {"max_new_tokens": 9, "num_beams": 2, "early_stopping": False}
    expected = model.generate(ids, **options)
    with (
        in_process_swarm(tmp_path / "model", [Span(0, 3)], tmp_path, pieces=3) as addresses,
        RemoteNetwork.from_pretrained(tmp_path / "model", initial_peers=addresses) as network,
    ):
        generator: Any = make_generator(network)
        assert generator.generate(ids, **options).tolist() == expected.tolist()
    assert len(visited) == expected.shape[1] - 1, "no request failed"
