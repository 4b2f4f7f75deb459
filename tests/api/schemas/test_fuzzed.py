"""Whatever a model or a client writes is read, or refused with a reason: never an error of ours."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nesa_node.api.endpoints.embeddings import EmbeddingRequest
from nesa_node.api.endpoints.tokenization import DetokenizeRequest, TokenizeRequest
from nesa_node.api.generation.grammar import json_schema_grammar
from nesa_node.api.schemas.chat_request import ChatCompletionRequest, FunctionDefinition, Tool
from nesa_node.api.schemas.generation_request import CompletionRequest
from nesa_node.api.schemas.request_body import parse_body
from nesa_node.api.schemas.responses_request import ResponsesRequest
from nesa_node.api.schemas.tool_calls import ToolCallParser, forced_call_grammar
from nesa_node.web.problem import HttpProblem

BODIES = [
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
]
FUZZED = settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow], derandomize=True)

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**53 + 1, -(2**64), 10**400, 10**4000, -0.0, 1e308, 5e-324])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)


def json_values(keys: st.SearchStrategy[str], scalars: st.SearchStrategy[Any]) -> Any:
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5),
        max_leaves=12,
    )


CALL_KEYS = st.sampled_from(["name", "arguments", "parameters", "x"]) | st.text(max_size=3)
CALLS = json_values(CALL_KEYS, _SCALARS | st.just("now"))


@FUZZED
@given(
    value=CALLS,
    written=st.sampled_from(["bare", "tagged"]),
    around=st.sampled_from(
        ["{}", "ok <tool_call>{}</tool_call>", "<tool_call>{}", "{}<tool_call>"]
    ),
    cut=st.integers(0, 40),
)
def test_what_a_model_writes_is_words_or_calls(
    value: Any, written: Any, around: str, cut: int
) -> None:
    text = around.replace("{}", json.dumps(value))
    text = text[: len(text) - cut]
    reader = ToolCallParser(written, ["now"])
    words = "".join(reader.feed(text[at : at + 7]) for at in range(0, len(text), 7))
    rest, calls = reader.finish()
    assert words + rest or calls or not text.strip()
    for call in calls:
        assert call["function"]["name"] == "now"
        assert isinstance(call["function"]["arguments"], str)


@pytest.mark.parametrize("kind", BODIES)
def test_bodies_are_read_or_refused(kind: Any) -> None:
    fields = sorted(kind.model_fields)
    inner = st.sampled_from([*fields, "role", "content", "type", "text", "function", "schema"])

    @FUZZED
    @given(st.dictionaries(st.sampled_from(fields), json_values(inner, _SCALARS), max_size=6))
    def read(value: Any) -> None:
        with contextlib.suppress(HttpProblem):
            parse_body(kind, json.dumps(value).encode())

    read()


@FUZZED
@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:\\ue1\x00 é', max_size=60))
def test_bytes_are_read_or_refused(data: bytes | str) -> None:
    with contextlib.suppress(HttpProblem):
        parse_body(ChatCompletionRequest, data if isinstance(data, bytes) else data.encode())


SCHEMA_KEYS = st.sampled_from(
    ["type", "properties", "items", "anyOf", "$ref", "$defs", "pattern", "enum", "const", "minimum"]
)


@FUZZED
@given(st.dictionaries(SCHEMA_KEYS, json_values(SCHEMA_KEYS, _SCALARS), max_size=4))
def test_schemas_become_grammars_or_are_refused(schema: dict[str, Any]) -> None:
    with contextlib.suppress(ValueError):
        json_schema_grammar(schema)
    tool = Tool(type="function", function=FunctionDefinition(name="f", parameters=schema))
    with contextlib.suppress(HttpProblem):
        forced_call_grammar("bare", [tool], "required")
