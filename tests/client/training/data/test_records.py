"""Data files: kinds of records, and files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.client.training.data import records
from nesa_node.client.training.data.examples import IGNORED, TrainingExample
from nesa_node.client.training.data.records import TrainingData, read_examples
from nesa_node.core.errors import ConfigError
from tests.client.training.data.chat_tokenizers import PLAIN_WORDS, WITH_TOOLS, make_tokenizer

TOKENIZER = make_tokenizer(WITH_TOOLS)
CHAT = {
    "messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
}
PAIR = {"prompt": "the cat", "completion": " sat"}
PAIR_OF_CHATS = {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}
TEXT = {"text": "the cat sat"}
ASCII = '{"text": "the cat"}'


def read(path: Path, content: str | bytes, *, max_length: int = 512) -> TrainingData:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_examples(path, TOKENIZER, max_length=max_length)


def read_or_refuse(path: Path, content: str | bytes) -> TrainingData | str:
    """What is read, or the message of the refusal."""
    try:
        return read(path, content, max_length=8)
    except ConfigError as error:
        return str(error)


def jsonl(*found: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in found)


def show(example: TrainingExample) -> tuple[str, str]:
    """Its text, and what is learned of it."""
    learned = example.labels[example.labels != IGNORED]
    return str(TOKENIZER.decode(example.ids)), str(TOKENIZER.decode(learned))


CHAT_SHOWN = (
    "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nsat<|im_end|>\n",
    "sat<|im_end|>",
)


def test_file_may_mix_all_kinds_of_records(tmp_path: Path) -> None:
    data = read(tmp_path / "a.jsonl", jsonl(CHAT, PAIR, TEXT, PAIR_OF_CHATS))
    assert [show(example) for example in data.examples] == [
        CHAT_SHOWN,
        ("the cat sat<end>", " sat<end>"),
        ("the cat sat<end>", "the cat sat<end>"),
        CHAT_SHOWN,
    ]
    assert (data.num_cut, data.num_skipped) == (0, 0)
    assert data.num_tokens == sum(len(example.ids) for example in data.examples)
    assert data.num_targets == sum(example.num_targets for example in data.examples)


def test_kinds_of_files_give_the_same_examples(tmp_path: Path) -> None:
    texts = ["the cat\nsat", "on the mat", "é: \u2028 dog"]
    found = [{"text": text} for text in texts]
    contents = {
        "a.jsonl": jsonl(*found),
        "b.jsonl": "\ufeff" + "\r\n\r\n".join(json.dumps(each) for each in found),
        "a.json": json.dumps(found),
        "b.json": "\ufeff " + json.dumps(found, indent=2) + " \n",
        "a.txt": "\n \n\n".join(texts) + "\n\n\n",
        "b.TXT": "\ufeff\r\n" + "\r\n\r\n".join(text.replace("\n", "\r\n") for text in texts),
    }
    for name, content in contents.items():
        data = read(tmp_path / name, content)
        assert [show(example)[0] for example in data.examples] == [f"{t}<end>" for t in texts], name


def test_further_keys_are_ignored(tmp_path: Path) -> None:
    record = {**PAIR, "id": 7, "messages_count": [1]}
    assert len(read(tmp_path / "a.jsonl", jsonl(record)).examples) == 1


def test_null_counts_as_absent(tmp_path: Path) -> None:
    messages = [{**message, "tool_calls": None} for message in CHAT["messages"]]
    data = read(tmp_path / "a.jsonl", jsonl({"messages": messages, "tools": None, "text": None}))
    assert show(data.examples[0]) == CHAT_SHOWN
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]}
    data = read(tmp_path / "a.jsonl", jsonl({"messages": [CHAT["messages"][0], call]}))
    assert len(data.examples) == 1


def test_long_example_is_cut_and_one_without_learned_tokens_is_skipped(tmp_path: Path) -> None:
    long_answer = {"prompt": "the", "completion": " cat" * 50}
    long_prompt = {"prompt": "the cat" * 50, "completion": " sat"}
    data = read(tmp_path / "a.jsonl", jsonl(TEXT, long_answer, long_prompt, PAIR), max_length=10)
    assert [len(example) for example in data.examples] == [4, 10, 4]
    assert show(data.examples[1])[0] == "the" + " cat" * 9
    assert (data.num_cut, data.num_skipped) == (1, 1)


def test_answer_cut_to_its_first_token_is_still_learned(tmp_path: Path) -> None:
    data = read(tmp_path / "a.jsonl", jsonl({"prompt": "the", "completion": " cat cat"}))
    [whole] = data.examples
    data = read(
        tmp_path / "a.jsonl", jsonl({"prompt": "the", "completion": " cat cat"}), max_length=2
    )
    assert show(data.examples[0]) == ("the cat", " cat")
    assert len(whole) == 4


def test_no_example_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.jsonl: in none of the 2 records the first 3 tokens"):
        read(tmp_path / "a.jsonl", jsonl(CHAT, CHAT), max_length=3)


@pytest.mark.parametrize("batch_chars", [1, 40, 1 << 20])
def test_examples_do_not_depend_on_how_many_are_tokenized_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_chars: int
) -> None:
    found = [{"prompt": "the cat " * (i % 3), "completion": f"sat {i}"} for i in range(40)]
    monkeypatch.setattr(records, "_MAX_BATCH_CHARS", batch_chars)
    data = read(tmp_path / "a.jsonl", jsonl(*found))
    assert [show(example) for example in data.examples] == [
        (f"{each['prompt']}{each['completion']}<end>", f"{each['completion']}<end>")
        for each in found
    ]


REFUSED: dict[str, tuple[Any, str]] = {
    "a number": (1, r"a record is a JSON object: use \{\"messages\""),
    "a list": ([TEXT], "a record is a JSON object"),
    "no keys": ({}, r"these keys \(none\)"),
    "unknown keys": ({"prompt": "a", "answer": "b"}, r"these keys \('prompt', 'answer'\)"),
    "two kinds": ({**CHAT, **TEXT}, "two kinds, chat and text"),
    "text is no string": ({"text": ["a"]}, "text must be a string"),
    "no text": ({"text": " \n"}, "the text is empty"),
    "prompt is no string": ({"prompt": 1, "completion": "a"}, "must be two strings, or"),
    "strings and lists": ({**PAIR_OF_CHATS, "prompt": "a"}, "must be two strings, or"),
    "no completion": ({"prompt": "a", "completion": ""}, "the completion is empty"),
    "half a pair": ({"text": "the \ud83d cat"}, r"half of a surrogate pair \(\\ud83d\)"),
    "no messages": ({"messages": []}, "messages must be a list with at least one message"),
    "message is a string": ({"messages": ["hello"]}, r"messages\[0\] must be an object"),
    "no role": ({"messages": [{"content": "a"}]}, r"messages\[0\].role must be a string"),
    "no content": ({"messages": [{"role": "user"}]}, r"messages\[0\].content must be a string"),
    "content of parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        r"messages\[0\].content must be a string",
    ),
    "nothing to learn": ({"messages": CHAT["messages"][:1]}, "no message is the assistant's"),
    "empty prompt": ({**PAIR_OF_CHATS, "prompt": []}, "prompt must be a list with at least one"),
    "tools": ({**CHAT, "tools": "a"}, "tools must be a list of objects"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_record_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    record, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=rf"a\.jsonl, line 3: .*{reason}"):
        read(tmp_path / "a.jsonl", f"{ASCII}\n\n{json.dumps(record)}\n{ASCII}\n")
    with pytest.raises(ConfigError, match=rf"a\.json, line 4: .*{reason}"):
        read(tmp_path / "a.json", f"[\n{ASCII},\n\n{json.dumps(record)},\n{ASCII}\n]")


def test_record_whose_only_token_is_the_first_one_has_nothing_to_learn(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(
        "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ messages[1].content }}"
    )
    path = tmp_path / "a.jsonl"
    path.write_text(jsonl({"messages": [{"role": "user", "content": c} for c in "ab"]}))
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: the record has no token to learn"):
        read_examples(path, tokenizer, max_length=16)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b"", "a.jsonl: the file has no records; use"),
        ("a.jsonl", b"\n \n", "a.jsonl: the file has no records; use"),
        ("a.json", b" ", "a.json: the file has no records"),
        ("a.json", b"[ ]", "a.json: the file has no records"),
        ("a.txt", b"\n\n", "a.txt: the file has no records"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"', r"a.jsonl, line 2: not JSON \(.*, column 13\)"),
        ("a.json", b'[{"text":\n\n"b}', r"a.json, line 3: not JSON \(.*, column 1\)"),
        ("a.jsonl", b"the cat sat", r"a.jsonl, line 1: not JSON \("),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: not JSON .nested too deeply"),
        ("a.jsonl", b'{"n": ' + b"9" * 5000 + b"}", r"a.jsonl, line 1: not JSON \(Exceeds"),
        ("a.json", b"\n[" + b'{"a":' * 100_000, "a.json, line 2: not JSON .nested too deeply"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "line 2: not UTF-8 .byte 0xff"),
        ("a.json", b'[\n{"text": "\xff"}]', "line 2: not UTF-8 .byte 0xff"),
        ("a.txt", b"the\ncat\n\xe9t\xe9", "line 3: not UTF-8 .byte 0xe9"),
        ("a.json", b'{"text": "a"}', r"line 1: not a list of records \(expected \["),
        ("a.json", b'[\n{"text": "a"}\n{"text": "b"}]', r"line 3: .*\(expected , or \]"),
        ("a.json", b'[{"text": "a"},\n', r"line 2: not JSON \("),
        ("a.json", b'[{"text": "a"}', r"line 1: not a list .*\(expected , or \]"),
        ("a.json", b'[{"text": "a"}]\n\n[]', "line 3: text follows the list"),
        ("a.json", b"[]]", "line 1: text follows the list"),
        ("a.csv", b"text\na", r"a file named .jsonl, .json, .txt"),
        ("a", b"text\na", r"a file named .jsonl, .json, .txt"),
    ],
)
def test_file_that_is_none_is_refused(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path / name, content)


def test_large_line_paragraph_or_list_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(records, "MAX_JSON_BYTES", 1 << 20)
    long = "a" * (1 << 20)
    with pytest.raises(ConfigError, match="line 2: the line has more than 1 MiB"):
        read(tmp_path / "a.jsonl", jsonl(TEXT, {"text": long}))
    with pytest.raises(ConfigError, match="line 3: the paragraph has more than 1 MiB"):
        read(tmp_path / "a.txt", "the cat\n\n" + "the cat\n" * (1 << 18))
    with pytest.raises(ConfigError, match=r"a.json: the file has more than 1 MiB: write a .jsonl"):
        read(tmp_path / "a.json", json.dumps([{"text": long}]))


def test_line_of_the_greatest_length_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_LINE_BYTES", len(ASCII) + 1)
    assert len(read(tmp_path / "a.jsonl", f"{ASCII}\n{ASCII}\n").examples) == 2


def test_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    for name, reason in [("missing.jsonl", "No such file"), ("folder.jsonl", "directory")]:
        with pytest.raises(ConfigError, match=rf"{name}: cannot be read \(.*{reason}"):
            read_examples(tmp_path / name, TOKENIZER, max_length=16)


def test_limit_below_two_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 2 tokens, the limit is 1"):
        read(tmp_path / "a.jsonl", jsonl(TEXT), max_length=1)


def test_refusal_of_a_template_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(jsonl(CHAT, CHAT))
    tokenizer = make_tokenizer(PLAIN_WORDS.replace("capitalize", "no_such_filter"))
    with pytest.raises(ConfigError, match=r"line 1: the model's chat template refuses"):
        read_examples(path, tokenizer, max_length=16)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["messages", "prompt", "completion", "text", "role", "content", "tools"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(found=st.lists(JSON, max_size=3), suffix=st.sampled_from([".jsonl", ".json"]))
def test_any_json_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, found: list[Any], suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    content = jsonl(*found) if suffix == ".jsonl" else json.dumps(found)
    data = read_or_refuse(path, content)
    if isinstance(data, str):
        assert str(path) in data
    else:
        assert data.num_skipped + len(data.examples) == len(found)


@given(content=st.binary(max_size=60), suffix=st.sampled_from([".jsonl", ".json", ".txt"]))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"bytes{suffix}"
    data = read_or_refuse(path, content)
    assert not isinstance(data, str) or str(path) in data
