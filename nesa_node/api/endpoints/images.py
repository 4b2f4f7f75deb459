"""Endpoint `POST /v1/images/generations`: pictures of a text, by a pipeline of diffusers."""

from __future__ import annotations

import base64
import io
import time
from functools import partial
from typing import Annotated, Any, Literal

import torch
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from nesa_node.api.gateway import Gateway, GatewayOf, UsageCounter, UsageOf
from nesa_node.api.models.networks import Pipeline
from nesa_node.api.openapi import ImageList, describe
from nesa_node.api.responses.http_responses import ComputedResponse
from nesa_node.api.responses.in_flight import reserve_memory
from nesa_node.api.schemas.request_body import (
    AcceptedValues,
    FloatToInt,
    Label,
    ModelName,
    OnlyNull,
    RequestBody,
    Seed,
    Text,
    body_dependency,
)
from nesa_node.web.problem import invalid_request

MAX_PICTURES = 10
MAX_STEPS = 200
MAX_PIXELS = 4 << 20
"""Of one picture."""
USUAL_PIXELS = 1 << 20
USUAL_STEPS = 50
BYTES_PER_PIXEL = 12
"""Of a picture, while it becomes base64."""
TASK = "text-to-image"

router = APIRouter()


class ImageRequest(RequestBody):
    model: ModelName = None
    prompt: Annotated[Text, Field(min_length=1)]
    n: Annotated[int, Field(ge=1, le=MAX_PICTURES), FloatToInt] | None = None
    size: Annotated[str, Field(pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$")] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Annotated[Any, AcceptedValues("png")] = None
    quality: Annotated[Any, AcceptedValues("auto", "standard")] = None
    background: Annotated[Any, AcceptedValues("auto", "opaque")] = None
    moderation: Annotated[Any, AcceptedValues("auto", "low")] = None
    stream: Annotated[Any, AcceptedValues(False)] = None
    style: OnlyNull = None
    user: Label | None = None
    seed: Seed | None = Field(None, description="an extension: the same pictures for the same seed")
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS), FloatToInt] | None = Field(
        None, description="an extension: of denoising"
    )
    negative_prompt: Text | None = Field(None, description="an extension: what is not to be seen")


@router.post("/v1/images/generations", **describe("Paint pictures", ImageRequest, ImageList))
async def paint(
    gateway: GatewayOf,
    usage: UsageOf,
    body: Annotated[ImageRequest, body_dependency(ImageRequest)],
) -> Response:
    name = gateway.networks.require(body.model)
    pixels = USUAL_PIXELS
    size = _parse_size(body.size)
    if size is not None:
        pixels = size[0] * size[1]
        if pixels > MAX_PIXELS:
            raise invalid_request(
                f"size: {body.size} has more than {MAX_PIXELS >> 20} megapixels", param="size"
            )
    reserve_memory((body.n or 1) * pixels * BYTES_PER_PIXEL)
    compute = partial(_compute, gateway, usage, name, body, size)
    return ComputedResponse(compute, gateway.shutdown)


def _parse_size(text: str | None) -> tuple[int, int] | None:
    """Width and height; None: what the pipeline usually makes."""
    if text in (None, "auto"):
        return None
    width, height = map(int, str(text).split("x"))
    return width, height


async def _compute(
    gateway: Gateway,
    usage: UsageCounter,
    name: str,
    body: ImageRequest,
    size: tuple[int, int] | None,
) -> dict[str, Any]:
    usage.start(name, 0)
    # A step of a picture counts as a token.
    usage.charge((body.n or 1) * (body.steps or USUAL_STEPS))
    work = partial(_paint, body=body, size=size)
    pictures = await gateway.networks.run(name, TASK, work, alone=True)
    data = [
        {"url": f"data:image/png;base64,{each}"}
        if body.response_format == "url"
        else {"b64_json": each}
        for each in pictures
    ]
    return {"created": int(time.time()), "output_format": "png", "data": data}


def _paint(painter: Pipeline, body: ImageRequest, size: tuple[int, int] | None) -> list[str]:
    """PNG files in base64."""
    given: dict[str, Any] = {
        "num_images_per_prompt": body.n,
        "num_inference_steps": body.steps,
        "negative_prompt": body.negative_prompt,
    }
    if size is not None:
        given |= {"width": size[0], "height": size[1]}
    if body.seed is not None:
        given["generator"] = torch.Generator().manual_seed(body.seed)
    given = {key: value for key, value in given.items() if value is not None}
    output = painter(body.prompt, **given)
    made = []
    for picture in output.images:
        file = io.BytesIO()
        picture.save(file, "PNG")
        made.append(base64.b64encode(file.getvalue()).decode())
    return made
