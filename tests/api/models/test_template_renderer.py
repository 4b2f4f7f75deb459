"""A stranger's chat template is rendered within limits, as transformers renders it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nesa_node.api.models.sandbox import MAX_WAITING_RENDERINGS, TemplateRenderer
from nesa_node.api.processes.workers import MAX_ANSWER_WALL_S, ChildProcessPool, ChildProgram
from nesa_node.api.schemas import chat_template as templates
from nesa_node.api.schemas.chat_request import ChatMessage, Tool
from nesa_node.core.errors import BusyError
from nesa_node.web.problem import HttpProblem
from tests.api.models.test_sandbox import children
from tests.api.scripted import NAME, chat_body, events_of, serving
from tests.cli.tiny import TEMPLATE

HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "one long string": "{{ 'a' * 10**10 }}",
    "one large number": "{{ (9**(9**9)) % 10 }}",
    "a list that grows": (
        "{% set ns = namespace(all=[]) %}{% for a in range(99999) %}"
        "{% set ns.all = ns.all + ['a' * 99999] %}{% endfor %}"
    ),
    "while it is compiled": "{% if 'a' * 9**8 * 9**8 %}{% endif %}",
    "much text": "{{ 'a' * 2**24 }}",
    "calls without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "half a character": "{{ '\\ud83d' }}",
    "a refusal with half a character": "{{ raise_exception('\\ud83d') }}",
    "a long refusal": "{{ raise_exception('a' * 2**24) }}",
    "a filter of large cost": "{{ range(99999)|map('string')|list|tojson(indent=9999) }}",
}
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}\n"
    "    {%- if loop.index > 99 %}{% break %}{% endif %}\n"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_TOOLS = """{{ bos_token }}{%- set ns = namespace(found=false) %}
{% if tools is not none %}
    {{- tools | tojson(indent=2) }}
{% endif %}
{% for message in messages %}
    {% if message.tool_calls is defined %}
        {% for call in message.tool_calls %}
            {% set ns.found = true %}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
        {% endfor %}
    {% elif message.reasoning_content is defined %}
<think>{{ message.reasoning_content }}</think>
{% generation %}{{ message.content }}{% endgeneration %}
    {% else %}
[{{ message.role | upper }}] {{ message.content | trim }}
    {% endif %}
{% endfor %}
{{ eos_token if ns.found }} {{ strftime_now("%Y") }} {{ missing }}
"""
REFUSES = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}x"
HONEST = {
    "tiny": TEMPLATE,
    "chatml": CHATML,
    "tools": WITH_TOOLS,
    "several": {"default": CHATML, "tool_use": WITH_TOOLS},
    "refuses": REFUSES,
    "undefined": "{{ messages[0].role.nothing.further }}tools",
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "hello"}],
    "several": [
        {"role": "system", "content": " the  "},
        {"role": "user", "content": "größer\n 🎉 \u2028 \x00 <|im_end|>"},
        {"role": "assistant", "reasoning_content": "thinking", "content": "again "},
    ],
    "calls": [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"é": [1, 2.5, null]}'},
                }
            ],
        },
    ],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
async def renderer() -> AsyncIterator[TemplateRenderer]:
    made = TemplateRenderer()
    yield made
    await made.close()


class Characters:
    """A tokenizer whose tokens are characters, with the templates of a real one."""

    def __init__(self, tokenizer: Any, template: Any) -> None:
        self._tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template = template
        self.special_tokens_map = tokenizer.special_tokens_map

    def apply_chat_template(self, *given: Any, **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(*given, **options)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}


async def prompt_or_problem(
    tokenizer: Any, conversation: list[dict[str, Any]], render: Any = None, **options: Any
) -> object:
    messages = [ChatMessage.model_validate(message) for message in conversation]
    try:
        return await templates.chat_prompt(
            tokenizer, messages, max_tokens=1 << 20, render=render, **options
        )
    except HttpProblem as problem:
        return problem.status, problem.code, str(problem)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", HONEST)
async def test_what_it_makes_is_what_transformers_makes(
    renderer: TemplateRenderer,
    tokenizer: Any,
    template: str,
    conversation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)  # to be put back
    characters = Characters(tokenizer, HONEST[template])
    messages = CONVERSATIONS[conversation]
    for options in (
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"tools": [Tool.model_validate(TOOL)]},
    ):
        here = await prompt_or_problem(characters, messages, **options)
        there = await prompt_or_problem(characters, messages, renderer.render, **options)
        assert there == here


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_template_without_bound_is_refused_in_bounded_time_and_memory(
    renderer: TemplateRenderer, tokenizer: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    gateway, messages = psutil.Process(), CONVERSATIONS["one"]
    await prompt_or_problem(Characters(tokenizer, TEMPLATE), messages, renderer.render)
    before, began = gateway.memory_info().rss, time.monotonic()
    hostile = Characters(tokenizer, HOSTILE[name])
    problem = await prompt_or_problem(hostile, messages, renderer.render)
    assert isinstance(problem, tuple)
    assert problem[:2] == (400, "template_error")
    assert time.monotonic() - began < MAX_ANSWER_WALL_S
    assert gateway.memory_info().rss - before < 100 << 20
    began = time.monotonic()
    honest = await prompt_or_problem(Characters(tokenizer, TEMPLATE), messages, renderer.render)
    assert isinstance(honest, list)


async def test_what_ends_a_process_says_its_limits(renderer: TemplateRenderer) -> None:
    before = children()
    with pytest.raises(ValueError, match="more than 1 s or 512 MiB"):
        await renderer.render(question(HOSTILE["loops"]))
    assert children() - before, "the next caller must wait for a process to start"


async def test_a_template_of_great_length_is_refused(
    renderer: TemplateRenderer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    large = Characters(tokenizer, "x" * (1 << 18) + "y")
    assert isinstance(await prompt_or_problem(large, CONVERSATIONS["one"]), list)
    problem = await prompt_or_problem(large, CONVERSATIONS["one"], renderer.render)
    assert "262144 characters" in str(problem)


async def test_templates_of_one_caller_do_not_hold_up_another(renderer: TemplateRenderer) -> None:
    await asyncio.gather(*(renderer.render(question("warm"), one) for one in ("honest", "other")))
    hostile = [
        asyncio.ensure_future(renderer.render(question(HOSTILE["loops"]), "hostile"))
        for _ in range(3)
    ]
    await asyncio.sleep(0.1)
    slowest = 0.0
    while not all(one.done() for one in hostile):
        began = time.monotonic()
        assert await renderer.render(question("{{ 1 + 1 }}"), "honest") == "2"
        slowest = max(slowest, time.monotonic() - began)
        await asyncio.sleep(0.05)
    assert slowest < 1
    for result in await asyncio.gather(*hostile, return_exceptions=True):
        assert isinstance(result, ValueError)


async def test_a_caller_with_many_requests_is_told_to_wait(renderer: TemplateRenderer) -> None:
    running = [
        asyncio.ensure_future(renderer.render(question("x"), "a"))
        for _ in range(MAX_WAITING_RENDERINGS)
    ]
    await asyncio.sleep(0)
    with pytest.raises(BusyError):
        await renderer.render(question("x"), "a")
    assert set(await asyncio.gather(*running)) == {"x"}


async def test_a_rendering_that_is_given_up_ends_its_process(renderer: TemplateRenderer) -> None:
    await renderer.render(question("x"))
    rendering = asyncio.ensure_future(renderer.render(question(HOSTILE["loops"])))
    await asyncio.sleep(0.3)
    before = children()
    rendering.cancel()
    await asyncio.gather(rendering, return_exceptions=True)
    assert before
    assert not before & children()


def question(template: str) -> bytes:
    return json.dumps({"conversations": [CONVERSATIONS["one"]], "chat_template": template}).encode()


PROGRAMS = {
    "does not load": "import missing",
    "ends at once": "raise SystemExit",
    "writes without end": (
        "import os\ndef prepare():\n"
        "    def answer(_):\n        while True: os.write(1, b'a' * 4096)\n    return answer"
    ),
}


@pytest.mark.parametrize("answer_bytes", [64, 1 << 16])
@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_that_fails_leaves_no_process(
    name: str, answer_bytes: int, tmp_path: Path
) -> None:
    """With 64 bytes asyncio has stopped reading stdout when the process is killed."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAMS[name], encoding="utf-8")
    before = children()
    processes = ChildProcessPool(ChildProgram(str(path), "fail", 1.0, 1 << 28, answer_bytes, 4))
    async with processes.wait_turn("") as ask:
        if name == "writes without end":
            assert await ask(b"1") is None
        else:
            with pytest.raises(BusyError, match="could not start a process to fail"):
                await ask(b"1")
    await processes.close()
    assert children() == before


async def test_a_discovered_model_with_a_hostile_template_delays_no_other_request(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tokenizer, names=()) as server:
        before = children()
        assert (await server.chat()).status_code == 200
        assert children() - before, "it was rendered here"
        monkeypatch.setattr(tokenizer, "chat_template", HOSTILE["loops"])
        asking = [
            asyncio.ensure_future(server.post(path, body))
            for path, body in (
                ("/v1/chat/completions", chat_body()),
                ("/v1/chat/completions", chat_body(stream=True)),
                ("/v1/responses", {"model": NAME, "input": "hello"}),
                ("/tokenize", {"model": NAME, "messages": chat_body()["messages"]}),
            )
        ]
        await asyncio.sleep(0.2)
        began = time.monotonic()
        while time.monotonic() - began < 2:
            asked = time.monotonic()
            body = {"model": NAME, "prompt": "hello", "max_tokens": 1}
            assert (await server.post("/v1/completions", body)).status_code == 200
            assert time.monotonic() - asked < 1
        for response in await asyncio.gather(*asking):
            if response.headers["content-type"].startswith("text/event-stream"):
                # On a busy machine a stream begins with a comment about the wait.
                error = events_of(response.text)[0]["error"]
            else:
                assert response.status_code == 400
                error = response.json()["error"]
            assert error["code"] == "template_error"
            assert "takes more than 1 s" in error["message"]
    assert not children() - before


async def test_a_model_that_the_operator_named_is_rendered_here(tokenizer: Any) -> None:
    async with serving(tokenizer) as server:
        before = children()
        assert (await server.chat()).status_code == 200
        assert children() == before


@pytest.mark.slow
async def test_the_demo_model_s_template_makes_the_same(renderer: TemplateRenderer) -> None:
    from nesa_node.core.settings.declaration import default_cache_dir
    from nesa_node.engine.weights.demo_model import demo_model_path
    from nesa_node.engine.weights.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(demo_model_path(default_cache_dir()))
    for messages in CONVERSATIONS.values():
        here = await prompt_or_problem(tokenizer, messages)
        assert here == await prompt_or_problem(tokenizer, messages, renderer.render)
        assert isinstance(here, list)
        assert here
