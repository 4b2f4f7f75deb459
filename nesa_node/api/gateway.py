"""State and dependencies that endpoints share: models, configuration, limits of keys."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from nesa_node import __version__
from nesa_node.api.answering.answers import Computed, EventStream, as_error
from nesa_node.api.answering.closing import Closing
from nesa_node.api.answering.usage import Usage
from nesa_node.api.bodies.templates import Render
from nesa_node.api.requests import ASKED
from nesa_node.api.serving.grammar_checker import GrammarChecker
from nesa_node.api.serving.models import Models
from nesa_node.api.serving.template_renderer import TemplateRenderer
from nesa_node.core.config import GatewayConfig
from nesa_node.core.ids import ModelId
from nesa_node.web.doorman import ANYBODY, Caller
from nesa_node.web.limits import Allowance
from nesa_node.web.problem import Problem

if TYPE_CHECKING:
    from nesa_node.api.serving.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Answers:
    """Response of a request, not yet computed: JSON by `whole`, or server-sent events by `events`.

    `failed` encodes an error within a stream; None: OpenAI's error event.
    """

    whole: Callable[[], Awaitable[Mapping[str, Any]]]
    events: Callable[[], AsyncGenerator[bytes, None]]
    failed: Callable[[Problem], bytes] | None = None


Prepare = Callable[["ServedModel"], Awaitable[Answers]]


@dataclass(frozen=True, slots=True)
class Gateway:
    models: Models
    config: GatewayConfig
    closing: Closing
    grammars: GrammarChecker
    templates: TemplateRenderer

    def answer(self, name: str | None, prepare: Prepare, *, stream: bool) -> Response:
        """HTTP response that opens the model called `name`, then computes what `prepare` returns.

        Opening a model may take minutes. During that time, a disconnecting client cancels the
        request, and a stream sends keep-alive comments.
        """
        ready: list[Answers] = []
        # Frees the request's body, which may be large, before the answer is computed.
        once = [prepare]

        async def prepared() -> Answers:
            model = await self.model(name)
            ready.append(await once.pop()(model))
            return ready[0]

        async def whole() -> Mapping[str, Any]:
            return await (await prepared()).whole()

        async def events() -> AsyncGenerator[bytes, None]:
            async with aclosing((await prepared()).events()) as made:
                async for data in made:
                    yield data

        def failed(problem: Problem) -> bytes:
            tell = (ready[0].failed if ready else None) or as_error
            return tell(problem)

        return self.streamed(events, failed=failed) if stream else self.computed(whole)

    def computed(self, work: Callable[[], Awaitable[Mapping[str, Any]]]) -> Response:
        """HTTP response with the JSON that `work` returns: see `answers.whole_response`."""
        return Computed(work, self.closing)

    def streamed(
        self,
        make: Callable[[], AsyncGenerator[bytes, None]],
        *,
        failed: Callable[[Problem], bytes] | None = None,
    ) -> Response:
        """HTTP response with the server-sent events that `make` yields."""
        return EventStream(make, self.closing, keepalive_s=self.config.keepalive_s, failed=failed)

    async def model(self, name: str | None) -> ServedModel:
        """Open model called `name`; None: the only one. Raises `Problem` and `NesaError`."""
        return await self.models.get(self._checked(name))

    def _checked(self, name: str | None) -> str | None:
        cards = self.models.cards()
        if name is None and len(cards) > 1:
            offered = ", ".join(card.name for card in cards[:20])
            raise Problem(
                400,
                f"model is required, since several are served: {offered}",
                code="missing_required_parameter",
                param="model",
            )
        return name

    def render(self, caller: str) -> Render | None:
        """Renderer of untrusted chat templates in a child process; None: models are trusted."""
        return partial(self.templates.render, caller=caller) if self.models.discovers else None

    async def watch(self, model: ServedModel) -> None:
        """Run until cancelled; raise `MissingBlocksError` once no node holds a block of `model`."""
        await self.models.watch(model.model_id)


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def _caller(request: Request) -> str:
    """Id of the request's API key (`web/access.py`); "" on a gateway without keys."""
    caller: Caller | None = request.scope.get("state", {}).get("caller")
    return "" if caller is None or caller.id == ANYBODY else caller.id


class Meter:
    """Token meter of one request, for the limits of its key and for the log."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self._allowance: Allowance | None = state.get("allowance")

    def __call__(self, tokens: int) -> None:
        if self._allowance is not None:
            self._allowance.spend_tokens(tokens)

    def usage(self, model: str, prompt_tokens: int) -> Usage:
        """Usage counter of a request to `model`, also kept for the log."""
        self._state[ASKED] = model, (usage := Usage(prompt_tokens, self))
        return usage


def _meter(request: Request) -> Meter:
    return Meter(request.scope.setdefault("state", {}))


SpendOf = Annotated[Meter, Depends(_meter)]
CallerOf = Annotated[str, Depends(_caller)]
GatewayOf = Annotated[Gateway, Depends(_gateway)]


def fingerprint(model_id: ModelId) -> str:
    """`system_fingerprint` of responses; changes with the weights and the program's version."""
    return f"fp_{hashlib.sha256(f'{model_id} {__version__}'.encode()).hexdigest()[:12]}"
