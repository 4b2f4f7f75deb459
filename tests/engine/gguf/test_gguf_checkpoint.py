"""A GGUF file as a model that commands open: its id, config, tokenizer, parts, and the hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoTokenizer, Gemma2Config, LlamaConfig, Qwen2Config, StableLmConfig

from nesa_node.client.model.auto import load_generation_config
from nesa_node.core.errors import (
    ConfigError,
    CorruptCheckpointError,
    DiskLimitError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from nesa_node.core.ids import Span, model_name_candidates
from nesa_node.engine.gguf.checkpoint import GGUF_FOLDER, open_gguf
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.engine.weights.hub import fetch_config, open_checkpoint
from nesa_node.engine.weights.language_models import is_language_model
from nesa_node.engine.weights.tokenizer import load_discovered_tokenizer, load_tokenizer
from nesa_node.engine.weights.weights_root import hash_span
from tests.engine.fake_hub import FakeHub, fake_hub
from tests.engine.gguf_files import (
    Kind,
    add_byte_tokenizer,
    add_piece_tokenizer,
    make_random_model,
    write_gguf,
)

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
TEXTS = (
    "the thin man in a hat",
    "  two spaces\n\nand lines\t",
    "<|start|>the<|end|> <think>in</think>",
    "Größe, 中文, 🙂 1234567",
    "",
)
_AUTO: Any = AutoTokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    return make_random_model(LlamaConfig(**SIZES))


@pytest.fixture
def small(model: Any, tmp_path: Path) -> Path:
    path = tmp_path / "files" / "tiny-Q8_0.gguf"
    path.parent.mkdir()
    return write_gguf(model, path, kind=Kind.Q8_0, tokenizer=add_byte_tokenizer)


@pytest.fixture
def opened(small: Path, tmp_path: Path) -> Checkpoint:
    return open_checkpoint(str(small), cache_dir=tmp_path / "cache")


def test_a_file_is_a_language_model_with_an_id(opened: Checkpoint) -> None:
    assert opened.name == "tiny-Q8_0"
    assert is_language_model(opened.folder, name=opened.name)
    assert opened.num_blocks == 4
    assert opened.context_length == 256
    assert str(compute_model_id(opened)).startswith("tiny-Q8_0@")


def test_the_id_tells_files_apart_and_not_places(
    opened: Checkpoint, small: Path, model: Any, tmp_path: Path
) -> None:
    known = compute_model_id(opened)
    (tmp_path / "copy").mkdir()
    copied = shutil.copy(small, tmp_path / "copy" / small.name)
    assert compute_model_id(open_gguf(Path(copied), tmp_path / "other cache")) == known
    changed = bytearray(small.read_bytes())
    changed[-1] ^= 1
    (tmp_path / "copy" / small.name).write_bytes(changed)
    assert compute_model_id(open_gguf(Path(copied), tmp_path / "cache")) != known
    longer = write_gguf(
        model, tmp_path / "copy" / "a.gguf", kind=Kind.Q8_0, tokenizer=add_byte_tokenizer,
        metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    )  # fmt: skip
    longer = longer.rename(copied)
    assert compute_model_id(open_gguf(longer, tmp_path / "cache")) != known


def test_the_safetensors_of_a_model_have_another_id(model: Any, tmp_path: Path) -> None:
    path = write_gguf(model, tmp_path / "same.gguf")
    model.save_pretrained(tmp_path / "same")
    cache = tmp_path / "cache"
    found, plain = (
        open_checkpoint(str(each), cache_dir=cache) for each in (path, path.with_suffix(""))
    )
    assert found.name == plain.name
    assert compute_model_id(found) != compute_model_id(plain)


def test_opening_reads_no_tensor_and_writes_configs_once(small: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    checkpoint = open_gguf(small, tmp_path / "cache")
    start = min(info.offset for info in checkpoint.stored.values())
    with cut.open("wb") as stream:
        stream.write(small.read_bytes()[:start])
        stream.truncate(small.stat().st_size)  # all weights are a hole
    open_gguf(cut, tmp_path / "cache")
    before = {path: path.stat().st_mtime_ns for path in checkpoint.folder.iterdir()}
    assert sorted(path.name for path in before) == ["config.json", "generation_config.json"]
    again = open_gguf(small, tmp_path / "cache")
    assert again.folder == checkpoint.folder
    assert {path: path.stat().st_mtime_ns for path in again.folder.iterdir()} == before


def test_digests_of_a_span_are_of_the_tensors_that_were_read(opened: Checkpoint) -> None:
    known: dict[str, bytes] = {}
    root = hash_span(opened, Span(1, 3), known)
    opened.read_digests = {}
    for name in known:
        opened.read(name)
    assert opened.read_digests == known
    assert len(known) == 2 * 9
    assert hash_span(opened, Span(0, 2), {}) != root


@pytest.mark.parametrize("give_slash", [False, True])
def test_a_folder_with_one_file_is_that_model(
    small: Path, opened: Checkpoint, tmp_path: Path, give_slash: bool
) -> None:
    name = str(small.parent) + "/" * give_slash
    found = open_checkpoint(name, cache_dir=tmp_path / "cache")
    assert compute_model_id(found) == compute_model_id(opened)
    assert {opened.name} <= model_name_candidates(name) & model_name_candidates(str(small))


def test_a_folder_under_the_cache_is_found_by_name(small: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    small.parent.rename(tmp_path / "cache" / "mine")
    assert open_checkpoint("mine", cache_dir=tmp_path / "cache").name == "tiny-Q8_0"


def test_of_several_files_one_has_to_be_named(small: Path, tmp_path: Path) -> None:
    shutil.copy(small, small.with_name("other.gguf"))
    with pytest.raises(ConfigError, match=r"name one of other\.gguf, tiny-Q8_0\.gguf"):
        open_checkpoint(str(small.parent), cache_dir=tmp_path / "cache")


def test_a_file_that_is_not_there_and_a_revision_are_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"there is no file .*nowhere\.gguf; of the hub"):
        open_checkpoint(str(tmp_path / "nowhere.gguf"), cache_dir=tmp_path / "cache")
    with pytest.raises(ModelNotFoundError, match=r"there is no file nowhere\.gguf"):
        open_checkpoint("nowhere.gguf", cache_dir=tmp_path / "cache")
    with pytest.raises(ConfigError, match="a revision names a version on the hub"):
        open_checkpoint(str(small), revision="main", cache_dir=tmp_path / "cache")


def test_a_split_model_is_one(model: Any, small: Path, opened: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "split"
    folder.mkdir()
    write_gguf(
        model, folder / "tiny-Q8_0.gguf", kind=Kind.Q8_0, tokenizer=add_byte_tokenizer,
        split_max_tensors=16,
    )  # fmt: skip
    parts = sorted(folder.iterdir())
    assert len(parts) == 3
    for given in (folder, parts[0], parts[2]):
        found = open_checkpoint(str(given), cache_dir=tmp_path / "cache")
        assert found.name == "tiny-Q8_0"
        assert {info.file for info in found.stored.values()} == {str(part) for part in parts}
        assert found.tensor_digests() == opened.tensor_digests()
        assert all(torch.equal(found.read(name), opened.read(name)) for name in found.tensors)
    parts[1].unlink()
    with pytest.raises(ModelNotFoundError, match=r"lacks tiny-Q8_0-00002-of-00003\.gguf"):
        open_checkpoint(str(parts[0]), cache_dir=tmp_path / "cache")


def test_commands_that_read_a_config_alone_find_it(small: Path, tmp_path: Path) -> None:
    folder = fetch_config(str(small), cache_dir=tmp_path / "cache")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert folder.is_relative_to(tmp_path / "cache" / GGUF_FOLDER)


def test_ids_that_end_an_answer_come_from_the_metadata(model: Any, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        add_byte_tokenizer(writer)
        writer.add_eot_token_id(7)

    checkpoint = open_gguf(write_gguf(model, tmp_path / "m.gguf", tokenizer=add), tmp_path / "c")
    found = load_generation_config(checkpoint)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (262, [263, 7], 0)


def _tokenizers(path: Path, folder: Path) -> tuple[Any, Any]:
    options: dict[str, Any] = {"local_files_only": True, "gguf_file": path.name}
    return load_tokenizer(folder), _AUTO.from_pretrained(path.parent, **options)


@pytest.mark.parametrize(
    ("kind", "add"),
    [
        (LlamaConfig, add_byte_tokenizer),
        (LlamaConfig, add_piece_tokenizer),
        (Qwen2Config, add_byte_tokenizer),
        (Gemma2Config, add_piece_tokenizer),
        (StableLmConfig, add_byte_tokenizer),
    ],
)
def test_the_tokenizer_is_that_of_transformers(
    tmp_path: Path, kind: Any, add: Callable[[gguf.GGUFWriter], None]
) -> None:
    path = write_gguf(make_random_model(kind(**SIZES)), tmp_path / "m.gguf", tokenizer=add)
    folder = open_gguf(path, tmp_path / "cache").fetch_side_files()
    ours, expected = _tokenizers(path, folder)
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(ours, name) == getattr(expected, name)
    assert ours.chat_template == expected.chat_template
    for each in TEXTS:
        wanted = expected(each)["input_ids"]
        assert ours(each)["input_ids"] == wanted
        assert ours.decode(wanted) == expected.decode(wanted)
    if ours.chat_template:
        chat = [{"role": "user", "content": "the"}]
        assert ours.apply_chat_template(chat, tokenize=False) == "<|start|>the<|end|>"


def test_a_tokenizer_that_transformers_takes_for_another_is_refused(tmp_path: Path) -> None:
    """It builds Qwen2's own of any vocabulary of a Qwen2."""
    path = write_gguf(
        make_random_model(Qwen2Config(**SIZES)), tmp_path / "m.gguf", tokenizer=add_piece_tokenizer
    )
    checkpoint = open_gguf(path, tmp_path / "cache")
    with pytest.raises(UnsupportedModelError, match=r"takes for another one \(Qwen2Tokenizer\)"):
        checkpoint.fetch_side_files()


def test_a_discovered_model_has_the_same_tokens(opened: Checkpoint) -> None:
    folder = opened.fetch_side_files()
    trusted, checked = load_tokenizer(folder), load_discovered_tokenizer(folder)
    for each in TEXTS:
        assert trusted(each)["input_ids"] == checked(each)["input_ids"]


def test_a_model_without_a_tokenizer_is_served_without(model: Any, tmp_path: Path) -> None:
    checkpoint = open_gguf(write_gguf(model, tmp_path / "m.gguf"), tmp_path / "cache")
    folder = checkpoint.fetch_side_files()
    assert not (folder / "tokenizer.json").exists()
    with pytest.raises(ModelNotFoundError, match="no usable tokenizer"):
        load_tokenizer(folder)


def _lists(writer: gguf.GGUFWriter, tokens: list[str], **changed: Any) -> None:
    writer.add_tokenizer_model(changed.get("model", "gpt2"))
    writer.add_token_list(tokens)
    if changed.get("types") is not None:
        writer.add_token_types(changed["types"])
    if changed.get("merges") is not None:
        writer.add_token_merges(changed["merges"])
    if changed.get("bos") is not None:
        writer.add_uint32("tokenizer.ggml.bos_token_id", changed["bos"])
    if changed.get("template") is not None:
        writer.add_chat_template(changed["template"])


@pytest.mark.parametrize(
    ("tokens", "changed", "said"),
    [
        (["a", "b"], {"model": "rwkv"}, "tokenizer of the kind 'rwkv', which cannot be read"),
        (["a", "b" * 2000], {"merges": ["a b"]}, "a token of more than 1024 characters"),
        (["a", "b"], {}, "neither merges nor scores"),
        (["a", "a"], {"merges": ["a b"]}, "a token twice"),
        (["a", "b"], {"merges": ["a b c"]}, "cannot be read"),
        (["a", "b"], {"merges": ["a b"], "types": [1]}, "no token_type for each token"),
        (["a", "b"], {"merges": ["a b"], "template": "x" * (2 << 20)}, "no chat template"),
        (["a", "b" * 300], {"merges": ["a b"], "types": [1, 3]}, "special tokens, or a long one"),
        (["a", "b"], {"merges": ["a b"], "bos": 200}, r"has no token 200 \(bos\)"),
    ],
)
def test_a_hostile_tokenizer_is_refused_in_one_line(
    model: Any, tmp_path: Path, tokens: list[str], changed: dict[str, Any], said: str
) -> None:
    path = write_gguf(
        model, tmp_path / "m.gguf", tokenizer=lambda writer: _lists(writer, tokens, **changed)
    )
    checkpoint = open_gguf(path, tmp_path / "cache")
    with pytest.raises((CorruptCheckpointError, UnsupportedModelError), match=said) as raised:
        checkpoint.fetch_side_files()
    assert "\n" not in str(raised.value)
    assert sorted(path.name for path in checkpoint.folder.iterdir()) == [
        ".lock", "config.json", "generation_config.json",
    ]  # fmt: skip


def test_tokens_without_embeddings_are_refused(model: Any, tmp_path: Path) -> None:
    path = write_gguf(
        model, tmp_path / "m.gguf", tokenizer=lambda writer: add_byte_tokenizer(writer, 321)
    )
    with pytest.raises(CorruptCheckpointError, match="321 tokens, and embeddings of 320"):
        open_gguf(path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"block_count": 0}, "block_count is 0"),
        ({"block_count": 5000}, "num_hidden_layers is 5000"),
        ({"embedding_length": -64}, "embedding_length is -64"),
        (
            {"attention.head_count": [4, 4, 4, 2]},
            "states another attention.head_count for each block",
        ),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon is 0.0"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
        ({"rope.freq_base": float("inf")}, "rope.freq_base is inf"),
        ({"rope.freq_base": "many"}, "rope.freq_base is 'many'"),
        ({"context_length": 1 << 31}, "context_length is 2147483648"),
        ({"expert_count": 70_000, "expert_used_count": 2}, "num_local_experts is 70000"),
    ],
)
def test_absurd_metadata_is_refused_in_one_line(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: Any, said: str
) -> None:
    from tests.engine import gguf_files

    add = gguf_files.add_settings

    def add_others(writer: gguf.GGUFWriter, config: Any) -> None:
        add(writer, config)
        for key in metadata:
            writer.kv_data[0].pop(f"llama.{key}", None)

    monkeypatch.setattr(gguf_files, "add_settings", add_others)
    path = write_gguf(model, tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises((CorruptCheckpointError, UnsupportedModelError), match=said) as raised:
        open_gguf(path, tmp_path / "cache")
    assert "\n" not in str(raised.value)


@pytest.fixture
def hub(small: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (small.parent / "README.md").write_text("a card")
    with fake_hub(small.parent) as served:
        yield served


def test_a_file_of_a_repository_is_downloaded_and_opened(
    hub: FakeHub, opened: Checkpoint, tmp_path: Path
) -> None:
    found = open_checkpoint(
        "org/tiny:tiny-Q8_0.gguf", cache_dir=tmp_path / "cache", endpoint=hub.url
    )
    assert found.name == opened.name
    assert compute_model_id(found) == compute_model_id(opened)
    assert set(hub.downloads) == {"tiny-Q8_0.gguf"}
    assert found.name in model_name_candidates("org/tiny:tiny-Q8_0.gguf")


def test_a_file_that_differs_from_the_hubs_hash_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.spoiled.add("tiny-Q8_0.gguf")
    with pytest.raises(CorruptCheckpointError, match="is not what the hub states"):
        open_checkpoint("org/tiny:tiny-Q8_0.gguf", cache_dir=tmp_path / "c", endpoint=hub.url)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("org/tiny:no.gguf", r"has no no\.gguf; its GGUF files: tiny-Q8_0\.gguf"),
        ("org/tiny", r"name one, such as org/tiny:tiny-Q8_0\.gguf"),
        ("org/tiny:../x.gguf", "there is no file"),
        ("org/tiny:/etc/x.gguf", "there is no file"),
    ],
)
def test_a_repository_of_files_says_which_it_has(
    hub: FakeHub, tmp_path: Path, name: str, said: str
) -> None:
    with pytest.raises(ModelNotFoundError, match=said):
        open_checkpoint(name, cache_dir=tmp_path / "cache", endpoint=hub.url)
    assert not hub.downloads


def test_limits_of_downloads_hold_for_a_file(hub: FakeHub, tmp_path: Path) -> None:
    for limit in ("max_disk_bytes", "max_model_bytes"):
        options: dict[str, Any] = {limit: 1000}
        with pytest.raises(DiskLimitError):
            open_checkpoint(
                "org/tiny:tiny-Q8_0.gguf", cache_dir=tmp_path / "c", endpoint=hub.url, **options
            )
    assert not hub.downloads
