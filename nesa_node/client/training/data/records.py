"""Data files of fine-tuning, read to examples.

A record is a JSON object of one of these kinds, and a file may mix them::

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}      or both with lists of messages
    {"text": "..."}

Learned are the assistant's messages, the completion, or all of a text. `tools` beside messages are
given to the chat template. Further keys are ignored, and null counts as no value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from transformers import PreTrainedTokenizerBase

from nesa_node.client.training.data.conversations import ConversationRenderer, Message
from nesa_node.client.training.data.examples import (
    ExampleTokenizer,
    SupervisedText,
    TrainingExample,
)
from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.declaration import user_path

MAX_LINE_BYTES = 8 << 20
"""Limit on a line of a file, and on a paragraph of text."""
MAX_JSON_BYTES = 1 << 28
"""Limit on a `.json` file, which is parsed in memory."""
MIN_LENGTH = 2
"""Fewest tokens of an example: one that is given, and one that is learned."""
_MAX_BATCH_CHARS = 1 << 20
"""Characters that are tokenized at once, which takes up to 200 bytes of memory for each."""
_KINDS: Mapping[str, tuple[str, ...]] = {
    "chat": ("messages",),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}
_EXPECTED = (
    'use {"messages": [{"role": "user", "content": "..."}, ...]}, '
    '{"prompt": "...", "completion": "..."} or {"text": "..."}'
)
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Examples of a file, in its order."""

    examples: tuple[TrainingExample, ...]
    num_cut: int
    """Examples that were longer than the limit and lost their end."""
    num_skipped: int
    """Records whose learned tokens all lie beyond the limit. They have no example."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.examples))

    @property
    def num_targets(self) -> int:
        return sum(example.num_targets for example in self.examples)


def read_examples(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, *, max_length: int
) -> TrainingData:
    """Read a `.jsonl` file, a `.json` file with a list, or a `.txt` file of paragraphs.

    Paragraphs are separated by blank lines, and each is a text. Texts and completions end in the
    end of the sequence, which is learned; examples of more than `max_length` tokens are cut to it.
    Raises `ConfigError`, with the line where a record begins, for a file that cannot be read, a
    record that is of no kind or has nothing to learn, and if no example is left.
    """
    if max_length < MIN_LENGTH:
        raise ConfigError(f"examples need at least {MIN_LENGTH} tokens, the limit is {max_length}")
    path = user_path(path)
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise ConfigError(f"{path}: training data is a file named {', '.join(_READERS)}")
    examples: list[TrainingExample] = []
    num_records = num_cut = 0
    try:
        with path.open("rb") as file:
            for example in _make_examples(read(path, file), tokenizer):
                num_records += 1
                cut = example if len(example) <= max_length else example.cut(max_length)
                if cut.num_targets:
                    examples.append(cut)
                    num_cut += cut is not example
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not num_records:
        raise ConfigError(f"{path}: the file has no records; {_EXPECTED}")
    if not examples:
        raise ConfigError(
            f"{path}: in none of the {num_records} records the first {max_length} tokens have one "
            "to learn: allow longer examples, or shorten the prompts"
        )
    return TrainingData(tuple(examples), num_cut, num_records - len(examples))


def _make_examples(
    records: Iterator[tuple[str, object]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[TrainingExample]:
    """Examples of `records`, which come with where they stand; of any length."""
    encoder = ExampleTokenizer(tokenizer)
    for batch in _make_batches(records, ConversationRenderer(tokenizer)):
        encoded = encoder.tokenize([text for _, text in batch])
        for (where, _), example in zip(batch, encoded, strict=True):
            if not example.num_targets:
                raise ConfigError(f"{where}: the record has no token to learn: remove it")
            yield example


def _make_batches(
    records: Iterator[tuple[str, object]], renderer: ConversationRenderer
) -> Iterator[list[tuple[str, SupervisedText]]]:
    """Records as texts, in lists of a bounded size."""
    batch, size = [], 0
    for where, record in records:
        try:
            text = _make_text(record, renderer)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        batch.append((where, text))
        size += len(text.text)
        if size >= _MAX_BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _make_text(record: object, renderer: ConversationRenderer) -> SupervisedText:
    """Raises `ConfigError` without the place of the record."""
    if not isinstance(record, dict):
        raise ConfigError(f"a record is a JSON object: {_EXPECTED}")
    # Tables with a column for each key have null where a record lacks it.
    record = {key: value for key, value in record.items() if value is not None}
    kinds = [kind for kind, keys in _KINDS.items() if all(key in record for key in keys)]
    if not kinds:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise ConfigError(f"no known kind of record has these keys ({keys[:200]}): {_EXPECTED}")
    if len(kinds) > 1:
        raise ConfigError(
            f"the record is of two kinds, {kinds[0]} and {kinds[1]}: remove the keys of one"
        )
    text = _MAKERS[kinds[0]](record, renderer)
    try:
        text.text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"half of a surrogate pair (\\u{ord(text.text[error.start]):04x}) is no character: "
            "write the character itself"
        ) from None
    return text


def _make_chat(record: dict[str, Any], renderer: ConversationRenderer) -> SupervisedText:
    return renderer.render(_get_messages(record, "messages"), _get_tools(record))


def _make_completion(record: dict[str, Any], renderer: ConversationRenderer) -> SupervisedText:
    if isinstance(record["prompt"], list) and isinstance(record["completion"], list):
        return renderer.render_completion(
            _get_messages(record, "prompt"),
            _get_messages(record, "completion"),
            _get_tools(record),
        )
    prompt, completion = record["prompt"], record["completion"]
    if not (isinstance(prompt, str) and isinstance(completion, str)):
        raise ConfigError("prompt and completion must be two strings, or two lists of messages")
    if not completion:
        raise ConfigError("the completion is empty, so that there is nothing to learn")
    whole = prompt + completion
    return SupervisedText(whole, ((len(prompt), len(whole)),), is_rendered=False)


def _make_plain(record: dict[str, Any], _: ConversationRenderer) -> SupervisedText:
    text = record["text"]
    if not isinstance(text, str):
        raise ConfigError("text must be a string")
    if not text.strip():
        raise ConfigError("the text is empty, so that there is nothing to learn")
    return SupervisedText(text, ((0, len(text)),), is_rendered=False)


_MAKERS: Mapping[str, Callable[[dict[str, Any], ConversationRenderer], SupervisedText]] = {
    "chat": _make_chat,
    "completion": _make_completion,
    "text": _make_plain,
}


def _get_messages(record: dict[str, Any], key: str) -> list[Message]:
    messages = record[key]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{key} must be a list with at least one message")
    return [_check_message(each, f"{key}[{index}]") for index, each in enumerate(messages)]


def _check_message(message: object, where: str) -> Message:
    """The message without keys that are null, as `apply_chat_template` leaves them out."""
    if not isinstance(message, dict):
        raise ConfigError(f'{where} must be an object: {{"role": "...", "content": "..."}}')
    found = {key: value for key, value in message.items() if value is not None}
    if not isinstance(role := found.get("role"), str) or not role:
        raise ConfigError(f"{where}.role must be a string, such as user or assistant")
    if "tool_calls" in found and "content" not in found:
        return found
    if not isinstance(found.get("content"), str):
        raise ConfigError(f"{where}.content must be a string")
    return found


def _get_tools(record: dict[str, Any]) -> list[Any] | None:
    if (tools := record.get("tools")) is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError("tools must be a list of objects: JSON schemas of functions")
    return tools


def _read_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Lines with their number from 1, without their end."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(
                f"{path}, line {number}: the line has more than {MAX_LINE_BYTES >> 20} MiB: "
                "write a record on each line, and split long texts"
            )
        yield number, _decode(line, path, number).rstrip("\r\n")


def _decode(content: bytes, path: Path, first_line: int) -> str:
    """Text of UTF-8 that begins at a line. A byte order mark at the beginning is left out."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        raise ConfigError(
            f"{path}, line {line}: not UTF-8 (byte 0x{content[error.start]:02x}): save the file "
            "as UTF-8"
        ) from None
    return text.removeprefix("\ufeff") if first_line == 1 else text


def _read_json_lines(path: Path, file: BinaryIO) -> Iterator[tuple[str, object]]:
    for number, line in _read_lines(path, file):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _make_json_refusal(path, number, error) from None
            yield f"{path}, line {number}", record


def _read_json_list(path: Path, file: BinaryIO) -> Iterator[tuple[str, object]]:
    """Elements of the list, one by one: a record's line is known, and an error stops early."""
    content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ConfigError(
            f"{path}: the file has more than {MAX_JSON_BYTES >> 20} MiB: write a .jsonl file, with "
            "a record on each line"
        )
    text = _decode(content, path, 1)
    if not text.strip():
        return
    lines = _LineCounter(text)
    decoder = json.JSONDecoder()
    at, expected = 0, "["
    while True:
        at = _skip_space(text, at)
        sign = text[at : at + 1]
        if not sign or sign not in expected:
            raise ConfigError(
                f"{path}, line {lines.find(at)}: not a list of records (expected "
                f"{' or '.join(expected)}); JSON lines are a file named .jsonl"
            )
        at = _skip_space(text, at + 1)
        if sign == "]" or (sign == "[" and text[at : at + 1] == "]"):
            break
        line = lines.find(at)
        try:
            record, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise _make_json_refusal(path, error.lineno, error) from None
        except (ValueError, RecursionError) as error:
            raise _make_json_refusal(path, line, error) from None
        yield f"{path}, line {line}", record
        at, expected = end, ",]"
    at = _skip_space(text, at + (sign == "["))
    if at < len(text):
        raise ConfigError(f"{path}, line {lines.find(at)}: text follows the list of records")


class _LineCounter:
    """Numbers of lines, from 1, at ascending positions of a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._line = 1
        self._counted = 0

    def find(self, at: int) -> int:
        self._line += self._text.count("\n", self._counted, at)
        self._counted = max(self._counted, at)
        return self._line


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _make_json_refusal(path: Path, line: int, error: Exception) -> ConfigError:
    match error:
        case json.JSONDecodeError():
            reason = f"{error.msg}, column {error.colno}"
        case RecursionError():
            reason = "nested too deeply"
        case _:
            reason = str(error)
    return ConfigError(f"{path}, line {line}: not JSON ({reason}); {_EXPECTED}")


def _read_paragraphs(path: Path, file: BinaryIO) -> Iterator[tuple[str, object]]:
    lines: list[str] = []
    first = size = 0
    for number, line in chain(_read_lines(path, file), [(0, "")]):
        if line.strip():
            first = first if lines else number
            lines.append(line)
            size += len(line)
            if size > MAX_LINE_BYTES:
                raise ConfigError(
                    f"{path}, line {first}: the paragraph has more than {MAX_LINE_BYTES >> 20} MiB "
                    "of characters: separate texts by blank lines"
                )
        elif lines:
            yield f"{path}, line {first}", {"text": "\n".join(lines)}
            lines, size = [], 0


_READERS: Mapping[str, Callable[[Path, BinaryIO], Iterator[tuple[str, object]]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json_list,
    ".txt": _read_paragraphs,
}
