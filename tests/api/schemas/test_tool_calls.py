"""Calls of tools in answers, however they come in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from nesa_node.api.generation.job import Job, SamplingParams
from nesa_node.api.processes.grammar_program import find_grammar_error
from nesa_node.api.schemas import tool_calls
from nesa_node.api.schemas.chat_request import (
    FunctionDefinition,
    Tool,
    ToolChoice,
    ToolChoiceFunction,
)
from nesa_node.api.schemas.request_body import MAX_CONTAINERS
from nesa_node.api.schemas.tool_calls import ToolCallParser, detect_call_format, forced_call_grammar
from nesa_node.web.problem import HttpProblem
from tests.api.served import answer, served_locally
from tests.engine.tiny_models import prompt_ids

ADD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/few"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"few": {"enum": [1, 2]}},
}
TOOLS = [
    Tool(type="function", function=FunctionDefinition(name="add", parameters=ADD)),
    Tool(type="function", function=FunctionDefinition(name="now")),
]


def read(written: Any, text: str, size: int) -> tuple[str, list[Any]]:
    """Words and calls of a text that comes in pieces of `size`."""
    reader = ToolCallParser(written, ["add", "now"])
    words = "".join(reader.feed(text[at : at + size]) for at in range(0, len(text), size))
    rest, calls = reader.finish()
    return words + rest, [(c["function"]["name"], c["function"]["arguments"]) for c in calls]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("written", "text", "words", "calls"),
    [
        ("tagged", CALL, "", [("add", '{"a":1}')]),
        ("tagged", f"Sure. {CALL}\n{CALL}", "Sure. ", [("add", '{"a":1}')] * 2),
        ("tagged", CALL.removesuffix("</tool_call>"), "", [("add", '{"a":1}')]),
        ("tagged", "a < b and <tool> too", "a < b and <tool> too", []),
        ("tagged", "<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
        ("tagged", CALL.replace("add", "rm"), CALL.replace("add", "rm"), []),
        ("bare", ' {"name": "now", "parameters": {}}', "", [("now", "{}")]),
        (
            "bare",
            '[{"name": "now"}, {"name": "add", "arguments": "x"}]',
            "",
            [("now", "{}"), ("add", "x")],
        ),
        ("bare", "It is {now}.", "It is {now}.", []),
        ("bare", '{"name": ["now"]}', '{"name": ["now"]}', []),
        ("tagged", CALL.replace('"add"', "{}"), CALL.replace('"add"', "{}"), []),
        ("tagged", CALL.replace("1", "9" * 30), "", [("add", f'{{"a":{"9" * 30}}}')]),
        ("bare", '{"answer": 1}', '{"answer": 1}', []),
        ("bare", '{"name": "now"', '{"name": "now"', []),
        (
            "bare",
            '{"name": "now", "arguments": {"x": "\\ud800"}}',
            '{"name": "now", "arguments": {"x": "\\ud800"}}',
            [],
        ),
    ],
)
def test_calls_are_told_from_words(
    written: str, text: str, words: str, calls: list[Any], size: int
) -> None:
    assert read(written, text, size) == (words, calls)


def test_templates_say_how_calls_are_written() -> None:
    assert detect_call_format("... <tool_call> ...") == "tagged"
    assert detect_call_format('{"name": ..., "parameters": ...}') == "bare"


def test_a_tool_that_is_not_there_cannot_be_chosen() -> None:
    choice = ToolChoice(type="function", function=ToolChoiceFunction(name="rm"))
    with pytest.raises(HttpProblem, match="tool_choice names"):
        forced_call_grammar("tagged", TOOLS, choice)


def test_schemas_that_take_long_to_compile_are_refused() -> None:
    many = {"properties": {f"p{number}": {"enum": ["a", "b"]} for number in range(5000)}}
    large = Tool(type="function", function=FunctionDefinition(name="large", parameters=many))
    with pytest.raises(HttpProblem, match="are allowed"):
        forced_call_grammar("bare", [*TOOLS, large], "required")
    choice = ToolChoice(type="function", function=ToolChoiceFunction(name="now"))
    assert forced_call_grammar("bare", [*TOOLS, large], choice)


def test_schemas_beyond_the_bound_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_calls, "_rebase_refs", None)
    large = Tool(
        type="function", function=FunctionDefinition(name="f", parameters={"enum": [1] * 200_000})
    )
    with pytest.raises(HttpProblem, match="are allowed"):
        forced_call_grammar("bare", [large], "required")


def test_an_answer_of_very_many_lists_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_calls, "from_json", None)
    text = '{"name": "now", "arguments": {"a": [' + "[]," * MAX_CONTAINERS + "1]}}"
    reader = ToolCallParser("bare", ["now"])
    assert reader.feed(text) == ""
    assert reader.finish() == (text, [])


def test_schemas_that_nothing_fits_are_refused_at_once() -> None:
    for schema in ({"type": "bogus"}, {"$ref": "#/nowhere"}, {"pattern": "((", "type": "string"}):
        tool = Tool(type="function", function=FunctionDefinition(name="odd", parameters=schema))
        assert find_grammar_error(
            forced_call_grammar("tagged", [*TOOLS, tool], "required"), LLTokenizer("byte")
        )


async def test_a_tool_without_parameters_is_called_without_arguments(tiny: Any) -> None:
    choice = ToolChoice(type="function", function=ToolChoiceFunction(name="now"))
    grammar = forced_call_grammar("tagged", TOOLS, choice)
    job = Job(
        prompt=tuple(prompt_ids(12)),
        max_tokens=200,
        sampling=SamplingParams(temperature=0),
        grammar=grammar,
    )
    async with served_locally(tiny("llama")) as served:
        made = await answer(served, job)
    assert made.text == '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert made.finish_reason == "stop"


@pytest.mark.parametrize("written", ["tagged", "bare"])
async def test_a_call_that_must_come_comes(written: Any, tiny: Any) -> None:
    choice = ToolChoice(type="function", function=ToolChoiceFunction(name="add"))
    grammar = forced_call_grammar(written, TOOLS, choice)
    job = Job(
        prompt=tuple(prompt_ids(12)),
        max_tokens=200,
        sampling=SamplingParams(temperature=0),
        grammar=grammar,
    )
    async with served_locally(tiny("llama")) as served:
        text = (await answer(served, job)).text
    words, ((name, arguments),) = read(written, text, 5)
    assert (words, name) == ("", "add")
    assert json.loads(arguments)["a"] in (1, 2)
