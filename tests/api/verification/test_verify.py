"""Answers of a real gateway over three nodes, saved to files and checked by the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nesa_node.cli.app import run_command
from tests.api.live import live_gateway
from tests.api.tokenizers import byte_level_tokenizer
from tests.cli.tiny import TEMPLATE
from tests.swarms import in_process_swarm, thirds

MESSAGES = [{"role": "user", "content": "the cat sat"}]
SCHEMA = {
    "type": "object",
    "properties": {"other": {"type": "string", "maxLength": 6}},
    "required": ["other"],
    "additionalProperties": False,
}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("completions", {"prompt": "the cat", "temperature": 0}),
    "sampled": ("completions", {"prompt": "the cat", "seed": 7}),
    "two prompts": ("completions", {"prompt": ["the", "the log"], "n": 2, "seed": 7}),
    "echo": ("completions", {"prompt": "the cat", "seed": 7, "echo": True}),
    "logprobs": ("completions", {"prompt": "the cat", "seed": 7, "logprobs": 0}),
    "echo with logprobs": (
        "completions",
        {"prompt": "the cat", "seed": 7, "echo": True, "logprobs": 0},
    ),
    "chat": ("chat/completions", {"messages": MESSAGES, "n": 3, "seed": 7}),
    "penalties": (
        "chat/completions",
        {
            "messages": MESSAGES,
            "seed": 7,
            "presence_penalty": 1.0,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.3,
            "logit_bias": {"40": 3},
            "logprobs": True,
        },
    ),
    "filters": (
        "chat/completions",
        {"messages": MESSAGES, "seed": 7, "top_p": 0.9, "top_k": 50, "min_p": 0.001},
    ),
    "schema": (
        "chat/completions",
        {
            "messages": MESSAGES,
            "seed": 7,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "other", "schema": SCHEMA},
            },
        },
    ),
    "response with logprobs": (
        "responses",
        {
            "input": "the cat sat",
            "temperature": 0,
            "include": ["message.output_text.logprobs"],
        },
    ),
}


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose tokens are bytes and pieces of words."""
    copy = tmp_path_factory.mktemp("models") / "bytes"
    shutil.copytree(tiny("llama"), copy)
    tokenizer: Any = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(copy)
    return copy


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    work = tmp_path_factory.mktemp("live")
    blocks = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    with (
        in_process_swarm(folder, thirds(blocks), work) as addresses,
        live_gateway(addresses, work, folder) as found,
    ):
        yield found


def ask(url: str, name: str, **more: Any) -> tuple[dict[str, Any], httpx.Response]:
    path, fields = REQUESTS[name]
    if path != "responses" and "logit_bias" not in fields:
        fields = {**fields, "logit_bias": not_text()}
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    body = {"model": "bytes", limit: 24, **fields, **more}
    answered = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
    assert answered.status_code == 200, answered.text
    return body, answered


def not_text() -> dict[str, int]:
    """Biases of a random model's tokens that are no text."""
    tokenizer: Any = byte_level_tokenizer()
    texts = {token_id: tokenizer.decode([token_id]) for token_id in range(len(tokenizer))}
    return {str(token_id): -100 for token_id, text in texts.items() if not text.isascii()}


def save(path: Path, request: Any, response: Any) -> Path:
    path.write_text(json.dumps({"request": request, "response": response}))
    return path


def check(
    path: Path, folder: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run_command(
        ["verify", str(path), str(folder), "--torch-dtype", "float32", "--json", *flags]
    )
    out = capsys.readouterr()
    assert out.out, out.err
    found: dict[str, Any] = json.loads(out.out)
    return code, found


@pytest.mark.parametrize("name", REQUESTS)
def test_honest_answers_are_consistent(
    name: str, url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request, answered = ask(url, name)
    path = save(tmp_path / "answer.json", request, answered.json())
    code, found = check(path, folder, capsys)
    assert (code, found["differing"]) == (0, 0), found
    assert found["consistent"]
    usage = answered.json()["usage"]
    assert found["tokens"] == usage.get("completion_tokens", usage.get("output_tokens"))


def test_a_stream_is_read_with_its_request(
    url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sampled", "chat", "logprobs", "response with logprobs"):
        request, answered = ask(url, name, stream=True)
        answer, own = tmp_path / "answer.txt", tmp_path / "request.json"
        answer.write_bytes(answered.content)
        own.write_text(json.dumps(request))
        code, found = check(answer, folder, capsys, "--request", str(own))
        assert (code, found["differing"]) == (0, 0), found
        # Without its end a stream is checked as far as it goes.
        if name == "sampled":
            lines = answered.content.splitlines(keepends=True)
            answer.write_bytes(b"".join(lines[: len(lines) // 2]))
            code, found = check(answer, folder, capsys, "--request", str(own))
            assert code == 0
            assert any("cut off" in note for note in found["notes"])


def test_an_answer_that_a_stop_text_ended_is_consistent(
    url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, whole = ask(url, "sampled")
    text = whole.json()["choices"][0]["text"]
    assert len(text) > 8
    for stop in (text[6:7], text[5:9]):
        request, answered = ask(url, "sampled", stop=["no such text", stop])
        choice = answered.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        code, found = check(save(tmp_path / "a.json", request, answered.json()), folder, capsys)
        assert (code, found["differing"]) == (0, 0), found
        # One that claims to have stopped earlier did not.
        shorter = {**choice, "text": choice["text"][:-1]}
        path = save(tmp_path / "a.json", request, {**answered.json(), "choices": [shorter]})
        assert check(path, folder, capsys)[0] == 1


def test_wrong_answers_are_noticed(
    url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request, answered = ask(url, "sampled")
    whole = answered.json()
    (choice,) = whole["choices"]
    text = choice["text"]
    letter = "a" if text[5] != "a" else "b"
    wrong: dict[str, tuple[Any, Any]] = {
        "another seed": ({**request, "seed": 8}, choice),
        "another prompt": ({**request, "prompt": "the dog"}, choice),
        "another temperature": ({**request, "temperature": 0.2}, choice),
        "a letter": (request, {**choice, "text": text[:5] + letter + text[6:]}),
        "no end": (request, {**choice, "text": text[:9], "finish_reason": "stop"}),
    }
    for name, (asked, given) in wrong.items():
        path = save(tmp_path / "answer.json", asked, {**whole, "choices": [given]})
        code, found = check(path, folder, capsys)
        assert (code, found["consistent"]) == (1, False), name


def test_text_and_log_probabilities_must_be_of_the_same_tokens(
    url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request, answered = ask(url, "logprobs")
    whole = answered.json()
    (choice,) = whole["choices"]
    listed = choice["logprobs"]
    off = [value - 0.1 for value in listed["token_logprobs"]]
    wrong: dict[str, Any] = {
        "an edited text": {**choice, "text": choice["text"] + " and more"},
        "log probabilities": {**choice, "logprobs": {**listed, "token_logprobs": off}},
        "no token": {**choice, "logprobs": {**listed, "tokens": ["zzzzz", *listed["tokens"][1:]]}},
    }
    for name, given in wrong.items():
        path = save(tmp_path / "answer.json", request, {**whole, "choices": [given]})
        assert check(path, folder, capsys)[0] == 1, name


def test_another_models_answer_is_noticed(
    url: str,
    folder: Path,
    tiny: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    request, answered = ask(url, "sampled")
    path = save(tmp_path / "answer.json", request, answered.json())
    code, found = check(path, folder, capsys, "--weights", "nf4")
    assert (code, found["consistent"]) == (1, False)
    assert found["computation"] == "float32 with nf4 weights"
    # In plain words, too.
    code = run_command(["verify", str(path), str(folder), "--weights", "nf4"])
    told = capsys.readouterr().out
    assert code == 1
    assert "The answer is NOT what" in told
    assert "where the model gives" in told


def test_a_swarm_checks_an_answer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    with (
        in_process_swarm(folder, thirds(blocks), tmp_path) as addresses,
        live_gateway(addresses, tmp_path, folder) as url,
    ):
        request, answered = ask(url, "chat")
        path = save(tmp_path / "answer.json", request, answered.json())
        peers = [flag for one in addresses for flag in ("--initial-peers", one)]
        code, found = check(path, folder, capsys, *peers)
    assert (code, found["differing"]) == (0, 0), found


def test_an_answer_of_int8_caches_is_checked_with_such_caches(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    with (
        in_process_swarm(folder, thirds(blocks), tmp_path, cache_dtype="int8") as addresses,
        live_gateway(addresses, tmp_path, folder) as url,
    ):
        request, answered = ask(url, "logprobs")
    path = save(tmp_path / "answer.json", request, answered.json())
    assert check(path, folder, capsys)[0] == 1
    code, found = check(path, folder, capsys, "--cache-dtype", "int8")
    assert (code, found["computation"]) == (0, "float32 with KV caches in int8")


def test_in_bfloat16_a_text_does_not_tell_its_tokens(
    url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request, answered = ask(url, "sampled")
    path = save(tmp_path / "answer.json", request, answered.json())
    assert run_command(["verify", str(path), str(folder), "--torch-dtype", "bfloat16"]) == 2
    assert "ask for logprobs" in capsys.readouterr().err


def test_sampled_answers_without_a_seed_need_log_probabilities(
    url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seen in (("sampled", False), ("logprobs", True)):
        request, answered = ask(url, name, seed=None)
        path = save(tmp_path / "answer.json", request, answered.json())
        if seen:
            code, found = check(path, folder, capsys)
            assert code == 0
            assert any("without a seed" in note for note in found["notes"])
            assert found["worst_logprob_error"] < 1e-3
        else:
            assert run_command(["verify", str(path), str(folder)]) == 2
            assert "without a seed" in capsys.readouterr().err


HONEST = {
    "object": "text_completion",
    "choices": [{"index": 0, "text": "the", "finish_reason": "length"}],
}
ASKED = {"prompt": "the", "temperature": 0, "max_tokens": 1}


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("", "has no answer"),
        ("{", "no JSON"),
        ("[1]", "has no answer"),
        (json.dumps(HONEST), "--request"),
        (json.dumps({"request": ASKED, "response": 3}), "no JSON object"),
        (json.dumps({"request": ASKED, "response": {}}), "object"),
        (json.dumps({"request": ASKED, "response": {"object": "list"}}), "no answer of"),
        (json.dumps({"request": {"prompt": 1}, "response": HONEST}), "would refuse"),
        (json.dumps({"request": {**ASKED, "x": 1}, "response": HONEST}), "unknown parameter"),
        (json.dumps({"request": ASKED, "response": {**HONEST, "choices": []}}), "no choices"),
        (
            json.dumps({"request": ASKED, "response": {**HONEST, "choices": [{"index": -1}]}}),
            "choices.0.index",
        ),
        (
            json.dumps({"request": ASKED, "response": {**HONEST, "choices": [{"index": 7}]}}),
            "was not asked for",
        ),
        (
            json.dumps({"request": ASKED, "response": {**HONEST, "choices": [{"text": ""}]}}),
            "no tokens",
        ),
        (
            json.dumps(
                {
                    "request": ASKED,
                    "response": {**HONEST, "choices": [{"text": "\ufffd"}]},
                }
            ),
            "no characters",
        ),
        ('data: {"error": {"message": "no"}}\n\n', "ended with an error"),
        ("data: [1]\n\n", "ended with an error"),
    ],
)
def test_files_that_are_no_answers_are_refused(
    written: str, told: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answer.json"
    path.write_text(written)
    assert run_command(["verify", str(path), str(folder), "--torch-dtype", "float32"]) == 2
    assert told in capsys.readouterr().err
