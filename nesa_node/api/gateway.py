"""State and dependencies that endpoints share, and telemetry of their requests."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from nesa_node import __version__
from nesa_node.api.generation.job import GenerationEvent, Job, PrefillDone, SessionEnd
from nesa_node.api.models.jobs import JobContext, RunJobs, run_jobs
from nesa_node.api.models.metrics import GatewayMetrics
from nesa_node.api.models.networks import NetworkRegistry
from nesa_node.api.models.registry import ModelRegistry
from nesa_node.api.models.sandbox import GrammarChecker, TemplateRenderer
from nesa_node.api.responses.http_responses import (
    ComputedResponse,
    SseResponse,
    collect_error_codes,
    error_events,
)
from nesa_node.api.responses.in_flight import GracefulShutdown
from nesa_node.api.schemas.chat_template import Render
from nesa_node.client.model.reruns import await_until_right
from nesa_node.core import tracing
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.models import GatewayConfig
from nesa_node.core.tracing import NO_SPAN, TraceContext, TraceSpan
from nesa_node.web.problem import HttpProblem, invalid_request
from nesa_node.web.rate_limits import Allowance

if TYPE_CHECKING:
    from nesa_node.api.models.served_model import ServedModel


log = get_logger(__name__)

USAGE_STATE_KEY = "asked"
"""Key of a request's `UsageCounter` in its state."""
VERIFICATION_HEADER = "x-nesa-verification"
CLIENT_CLOSED_STATUS = 499
"""Status counted for a client that disconnected before the response began; nginx's code."""


class RequestTelemetry:
    """Outermost middleware but for the one that assigns request ids.

    Counts all responses. Logs `request_answered`, with the key's name, the model and its tokens,
    for POST requests and paths below /v1. Starts a trace span for POST requests, the parent of
    their sessions' spans. Binds `request_id` to all log events of the request.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, routes: Iterable[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = frozenset(routes)
        metrics.add_routes(*self._routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, started_s = CLIENT_CLOSED_STATUS, time.perf_counter()

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        request_id, span = scope.get("state", {}).get("request_id", ""), self._start_span(scope)
        with (
            bound_contextvars(request_id=request_id),
            tracing.use_span(span),
            collect_error_codes() as codes,
        ):
            try:
                await self._app(scope, receive, sent)
            except Exception:
                status = 500 if status == CLIENT_CLOSED_STATUS else status
                raise
            finally:
                route = self._route_template(scope)
                self._metrics.count_response(route, status)
                span.set_attributes(
                    {"http.response.status_code": status, "nesa.request_id": request_id}
                )
                if scope["method"] == "POST" or (route or "").startswith("/v1/"):
                    ms = round((time.perf_counter() - started_s) * 1000, 1)
                    fields = _request_fields(scope) | ({"error": codes[-1]} if codes else {})
                    log.info("request_answered", route=route, status=status, ms=ms, **fields)

    def _start_span(self, scope: Scope) -> TraceSpan:
        path, method = scope["path"], scope["method"]
        if method != "POST" or path not in self._routes:
            return NO_SPAN
        parent = TraceContext.parse_header(Headers(scope=scope).get("traceparent", ""))
        attributes = {"http.request.method": method, "http.route": path}
        return tracing.start_span(f"{method} {path}", parent, attributes)

    def _route_template(self, scope: Scope) -> str | None:
        """Path template of the matching route; None if no known route matches."""
        if scope["path"] in self._routes:
            return str(scope["path"])
        template = getattr(scope.get("route"), "path_format", None)
        return template if template in self._routes else None


def _request_fields(scope: Scope) -> dict[str, object]:
    """Log fields of a request: key name, model and tokens, as far as they are known.

    Names of keys are not secret. Usage is removed from the state, which lives until the next
    request of the connection.
    """
    state = scope.get("state", {})
    found: dict[str, object] = {}
    if (caller := state.get("caller")) is not None:
        found["key"] = caller.name
    if (usage := state.pop(USAGE_STATE_KEY, None)) is not None:
        found |= {
            "model": usage.model,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.new_tokens,
        }
    return found


class UsageCounter:
    """Token counts of a request, charged to its key as they grow; prompts with the first event."""

    def __init__(self, state: dict[str, Any]) -> None:
        """`state` is the request's: it has the allowance of its key."""
        self._state = state
        self._allowance: Allowance | None = state.get("allowance")
        self._prompt_charged = False
        self.model = ""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.new_tokens = 0
        self.hops = 0
        self.drawn = 0

    def start(self, model: str, prompt_tokens: int) -> UsageCounter:
        """Count the tokens of a request to `model`, from zero, also for the log."""
        self.model, self.prompt_tokens = model, prompt_tokens
        self.cached_tokens = self.new_tokens = self.hops = self.drawn = 0
        self._state[USAGE_STATE_KEY] = self
        return self

    def charge(self, tokens: int) -> None:
        """Charge tokens to the request's key."""
        if self._allowance is not None:
            self._allowance.spend_tokens(tokens)

    @asynccontextmanager
    async def charge_prompt_on_cancel(self) -> AsyncIterator[None]:
        """Charge the prompt even if the client cancels the request during prefill."""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self._charge_prompt()
            raise

    def count(self, event: GenerationEvent) -> None:
        self._charge_prompt()
        if isinstance(event, PrefillDone):
            self.cached_tokens += event.cached_tokens
        elif isinstance(event, SessionEnd):
            self.hops += event.hops
            self.drawn += event.drawn
        elif event.tokens:
            self.new_tokens += len(event.tokens)
            self.charge(len(event.tokens))

    def _charge_prompt(self) -> None:
        if not self._prompt_charged:
            self._prompt_charged = True
            self.charge(self.prompt_tokens)

    def to_json(self) -> dict[str, Any]:
        """`usage` object of chats and completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "nesa_audits": self.audits(),
        }

    def audits(self) -> dict[str, int]:
        """Nodes of the request's sessions, and those that were drawn for audits."""
        return {"hops": self.hops, "drawn": self.drawn}


@dataclass(frozen=True, slots=True)
class PendingResponse:
    """Response of a request, not yet computed: JSON, or server-sent events.

    `build_json` may be called again if it fails. `error_event` encodes an error within a stream.
    """

    build_json: Callable[[], Awaitable[Mapping[str, Any]]]
    stream_events: Callable[[], AsyncGenerator[bytes, None]]
    usage: UsageCounter
    error_event: Callable[[HttpProblem], bytes] = error_events


def verification_header(config: GatewayConfig, usage: UsageCounter | None = None) -> dict[str, str]:
    """Header that says how nodes are audited: `audit=1%; scheme=relative-l2`.

    With the `usage` of an answer that is complete also of how many of its nodes: `; drawn=1/3`.
    """
    value = f"audit={100 * config.audit:g}%; scheme={config.audit_scheme}"
    if usage is not None:
        value += f"; drawn={usage.drawn}/{usage.hops}"
    return {VERIFICATION_HEADER: value}


Prepare = Callable[["ServedModel"], Awaitable[PendingResponse]]


@dataclass(frozen=True, slots=True)
class Gateway:
    models: ModelRegistry
    networks: NetworkRegistry
    config: GatewayConfig
    shutdown: GracefulShutdown
    grammars: GrammarChecker
    templates: TemplateRenderer

    def respond(self, name: str | None, prepare: Prepare, *, stream: bool) -> Response:
        """HTTP response that opens the model called `name`, then computes what `prepare` returns.

        Opening a model may take minutes. During that time, a disconnecting client cancels the
        request, and a stream sends keep-alive comments.
        """
        ready: list[PendingResponse] = []
        # Frees the request's body, which may be large, before the answer is computed.
        once = [prepare]

        async def prepared() -> PendingResponse:
            model = await self.get_model(name)
            ready.append(await once.pop()(model))
            return ready[0]

        async def whole() -> Mapping[str, Any]:
            return await await_until_right((await prepared()).build_json)

        async def events() -> AsyncGenerator[bytes, None]:
            async with aclosing((await prepared()).stream_events()) as made:
                async for data in made:
                    yield data

        def failed(problem: HttpProblem) -> bytes:
            return (ready[0].error_event if ready else error_events)(problem)

        config = self.config
        if not stream:
            return ComputedResponse(
                whole, self.shutdown, headers=lambda: verification_header(config, ready[0].usage)
            )
        return SseResponse(
            events,
            self.shutdown,
            keepalive_s=config.keepalive_s,
            error_event=failed,
            headers=verification_header(config),
        )

    async def get_model(self, name: str | None) -> ServedModel:
        """Open model called `name`; None: the only one. Raises `HttpProblem` and `NesaError`."""
        entries = self.models.entries()
        if name is None and len(entries) > 1:
            offered = ", ".join(entry.name for entry in entries[:20])
            raise invalid_request(
                f"model is required, since several are served: {offered}",
                param="model",
                code="missing_required_parameter",
            )
        return await self.models.get(name)

    def job_context(self, name: str | None) -> JobContext:
        """What jobs of a request to the model called `name` depend on."""
        return JobContext(
            config=self.config,
            check_grammar=self.grammars.check,
            render=self.template_renderer(),
            adapter=self.models.adapter_of(name),
        )

    def template_renderer(self) -> Render | None:
        """Renderer of untrusted chat templates in a child process; None: models are trusted."""
        return self.templates.render if self.models.discovers else None

    def job_runner(self, model: ServedModel, jobs: Sequence[Job]) -> RunJobs:
        """Runner of `jobs`, which fail at once if blocks of `model` are missing."""
        return partial(run_jobs, model, jobs, partial(self.models.watch_blocks, model.model_id))


def _get_gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def _get_usage(request: Request) -> UsageCounter:
    return UsageCounter(request.scope.setdefault("state", {}))


UsageOf = Annotated[UsageCounter, Depends(_get_usage)]
GatewayOf = Annotated[Gateway, Depends(_get_gateway)]


def system_fingerprint(model_id: ModelId) -> str:
    """`system_fingerprint` of responses; changes with the weights and the program's version."""
    return f"fp_{hashlib.sha256(f'{model_id} {__version__}'.encode()).hexdigest()[:12]}"
