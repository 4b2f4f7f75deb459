"""What the endpoints share: the models, and how requests are limited."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends
from starlette.requests import Request

from nesa_node import __version__
from nesa_node.api.models import Models
from nesa_node.core.config import GatewayConfig
from nesa_node.core.ids import ModelId
from nesa_node.web.limits import Allowance

if TYPE_CHECKING:
    from nesa_node.api.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Gateway:
    models: Models
    config: GatewayConfig

    async def watch(self, model: ServedModel) -> None:
        """Raises `MissingBlocksError` when nobody holds some blocks of `model`."""
        await self.models.watch(model.model_id)


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def _spend(request: Request) -> Spend:
    """What counts tokens against the limits of whoever asks (`web/access.py`)."""
    allowance: Allowance | None = request.scope["state"].get("allowance")
    return _free if allowance is None else allowance.spend_tokens


def _free(_tokens: int) -> None:
    return


Spend = Callable[[int], None]
SpendOf = Annotated[Spend, Depends(_spend)]
GatewayOf = Annotated[Gateway, Depends(_gateway)]


def fingerprint(model_id: ModelId) -> str:
    """Changes with the weights and with this program."""
    return f"fp_{hashlib.sha256(f'{model_id} {__version__}'.encode()).hexdigest()[:12]}"


def new_id(kind: str) -> str:
    """`chatcmpl-…`: ids nobody can guess."""
    return kind + secrets.token_hex(16)
