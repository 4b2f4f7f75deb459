"""A model that says what a test has written, and a swarm with the holes that it wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import torch
from starlette.routing import BaseRoute

from nesa_node.api.app import make_app
from nesa_node.api.gateway import RequestTelemetry
from nesa_node.api.generation.job import (
    CandidateToken,
    Delta,
    FinishReason,
    GenerationEvent,
    Job,
    PrefillDone,
    SamplingParams,
    SequenceToken,
)
from nesa_node.api.models.discovery import AnnouncedModel
from nesa_node.api.models.metrics import GatewayMetrics
from nesa_node.api.models.registry import ModelRegistry
from nesa_node.api.models.sandbox import GrammarChecker, TemplateRenderer
from nesa_node.api.responses.in_flight import GracefulShutdown
from nesa_node.core.errors import ModelNotFoundError
from nesa_node.core.ids import ModelId, Span
from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.core.settings.models import GatewayConfig
from nesa_node.swarm.adapter_catalog import PublishedAdapter
from nesa_node.web.server import serve_authenticated

MODEL_ID = ModelId("scripted@0123456789abcdef")
NAME = "scripted"
CONTEXT = 64
ANY_PORT = HttpAddress("127.0.0.1", 0)

Script = Callable[[Job], AsyncIterator[GenerationEvent]]


async def hello(job: Job) -> AsyncIterator[GenerationEvent]:
    """Each choice says "hello wörld", in two deltas."""
    yield PrefillDone(cached_tokens=1, tokens=_chosen(job.prompt) if job.prompt_logprobs else ())
    for index in range(job.n):
        yield Delta(index=index, text="hello", tokens=_chosen((5,), job))
    for index in range(job.n):
        yield Delta(index=index, text=" wörld", tokens=_chosen((6,), job), finish_reason="stop")


def says(*texts: str) -> Script:
    async def script(job: Job) -> AsyncIterator[GenerationEvent]:
        yield PrefillDone()
        for number, text in enumerate(texts, start=1):
            reason: FinishReason | None = "stop" if number == len(texts) else None
            yield Delta(index=0, text=text, tokens=_chosen((7,)), finish_reason=reason)

    return script


def _chosen(ids: Sequence[int], job: Job | None = None) -> tuple[SequenceToken, ...]:
    if job is not None and job.top_logprobs is None:
        return tuple(SequenceToken(token, b"", 0.0) for token in ids)
    top = (CandidateToken(1, b"\xc3", -0.5), CandidateToken(2, b"b", float("-inf")))
    return tuple(SequenceToken(token, b"t%d" % token, -0.25, top) for token in ids)


class ScriptedModel:
    """`running` counts the jobs that have been entered and not left."""

    def __init__(self, tokenizer: Any, script: Script = hello) -> None:
        self.name = NAME
        self.model_id = MODEL_ID
        self.is_private = False
        self.created = 1
        self.context_length = CONTEXT
        self.hidden_size = 2
        self.num_blocks = 6
        self.vocab_size = len(tokenizer)
        self.tokenizer = tokenizer
        self.defaults = SamplingParams()
        self.script = script
        self.jobs: list[Job] = []
        self.running = 0
        self.closed = False

    def generate(self, job: Job) -> AbstractAsyncContextManager[AsyncIterator[GenerationEvent]]:
        return self._generate(job)

    @asynccontextmanager
    async def _generate(self, job: Job) -> AsyncIterator[AsyncIterator[GenerationEvent]]:
        self.jobs.append(job)
        self.running += 1
        try:
            yield self.script(job)
        finally:
            self.running -= 1

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return [torch.tensor([0.6, 0.8]) for _ in prompts]

    async def join(self) -> None:
        return

    async def close(self) -> None:
        self.closed = True


class ScriptedLook:
    def __init__(self, holes: Sequence[Span] = ()) -> None:
        self.holes = tuple(holes)
        self.joining: tuple[Span, ...] = ()
        self.known: dict[ModelId, int] = {}
        self.adapters: dict[ModelId, Sequence[PublishedAdapter]] = {}

    async def fetch_all(self) -> dict[ModelId, AnnouncedModel]:
        return {MODEL_ID: AnnouncedModel(MODEL_ID, 6, self.holes, self.joining)}

    async def fetch(self, model_id: ModelId) -> AnnouncedModel | None:
        return (await self.fetch_all()).get(model_id)

    async def fetch_adapters(self, model_id: ModelId) -> Sequence[PublishedAdapter]:
        return self.adapters.get(model_id, ())

    def set_num_blocks(self, model_id: ModelId, num_blocks: int) -> None:
        self.known[model_id] = num_blocks

    def forget_num_blocks(self, model_id: ModelId) -> None:
        del self.known[model_id]


class Server:
    """A gateway with one scripted model that listens, and a client of it."""

    def __init__(
        self,
        model: ScriptedModel,
        look: ScriptedLook,
        address: HttpAddress,
        closing: GracefulShutdown,
    ) -> None:
        self.closing = closing
        self.model = model
        self.look = look
        self.address = address
        self.client = httpx.AsyncClient(base_url=f"http://{address}", timeout=20)

    async def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", chat_body(**fields))

    async def stream(self, path: str, body: object) -> list[Any]:
        """The events of an answer: JSON, or the text of what is none."""
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": "hello"}], **fields}


def events_of(text: str) -> list[Any]:
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in data]


@asynccontextmanager
async def serving(
    tokenizer: Any,
    script: Script = hello,
    *,
    holes: Sequence[Span] = (),
    pages: Sequence[BaseRoute] = (),
    names: Sequence[str] = (NAME,),
    opening: Callable[[], Awaitable[None]] | None = None,
    **config: Any,
) -> AsyncIterator[Server]:
    """Without `names` the model is discovered."""
    model, look = ScriptedModel(tokenizer, script), ScriptedLook(holes)

    async def open_model(name: str, ids: frozenset[ModelId] | None) -> Any:
        if opening is not None:
            await opening()
        return model

    async def locate(seen: AnnouncedModel) -> str:
        if names:
            raise ModelNotFoundError("nowhere")
        return seen.model_name

    models = ModelRegistry(names, directory=look, open_model=open_model, locate=locate)
    if len(names) == 1 and opening is None:
        await models.open_given()
    looking = None if names else asyncio.create_task(models.poll_swarm())
    settings = GatewayConfig.model_validate(config)
    closing, grammars, templates = GracefulShutdown(), GrammarChecker(), TemplateRenderer()
    app = make_app(
        models, settings, grammars=grammars, templates=templates, shutdown=closing, pages=pages
    )
    metrics = GatewayMetrics()
    async with serve_authenticated(
        app,
        settings,
        ANY_PORT,
        max_connections=512,
        wrap_app=lambda gated: RequestTelemetry(gated, metrics, app.openapi()["paths"]),
    ) as address:
        server = Server(model, look, address, closing)
        async with server.client:
            if looking is not None:
                await until(lambda: bool(models.entries()))
            yield server
    if looking is not None:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    await models.close()
    await grammars.close()
    await templates.close()


async def until(fact: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not fact():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def tokenizer_in(folder: Path) -> Any:
    from transformers import AutoTokenizer

    load = cast("Callable[..., Any]", AutoTokenizer.from_pretrained)
    return load(folder, local_files_only=True)
