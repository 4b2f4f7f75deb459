"""Endpoint `POST /v1/audio/transcriptions`: the words of a file of speech."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nesa_node.api.gateway import Gateway, GatewayOf, UsageCounter, UsageOf
from nesa_node.api.models.networks import Pipeline
from nesa_node.api.openapi import Transcription, describe
from nesa_node.api.responses.http_responses import ComputedResponse
from nesa_node.api.schemas.request_body import (
    AcceptedValues,
    ModelName,
    OnlyNull,
    RequestBody,
    parse_fields,
)
from nesa_node.core.errors import is_installed
from nesa_node.web.problem import HttpProblem, invalid_request

TASK = "automatic-speech-recognition"
MEDIA_TYPE = "multipart/form-data"
MAX_FIELDS = 16
MAX_FIELD_BYTES = 64 << 10
CHARACTERS_PER_TOKEN = 4

router = APIRouter()


def _add_file(schema: dict[str, Any]) -> None:
    """Describe the field that is no part of the parsed body."""
    file = {"type": "string", "format": "binary", "title": "File"}
    schema["properties"] = {"file": file, **schema["properties"]}
    schema["required"] = ["file", *schema.get("required", ())]


class TranscriptionRequest(RequestBody):
    model_config = ConfigDict(json_schema_extra=_add_file)

    model: ModelName = None
    language: Annotated[str, Field(pattern="^[a-z]{2,3}$")] | None = None
    response_format: Literal["json", "text"] | None = None
    temperature: Annotated[Any, AcceptedValues("0", "0.0")] = None
    stream: Annotated[Any, AcceptedValues("false")] = None
    prompt: OnlyNull = None


@router.post(
    "/v1/audio/transcriptions",
    **describe(
        "Transcribe speech (`file`: WAV, FLAC, OGG or MP3)",
        TranscriptionRequest,
        Transcription,
        media_type=MEDIA_TYPE,
    ),
)
async def transcribe(gateway: GatewayOf, usage: UsageOf, request: Request) -> Response:
    body, audio = await _read(request)
    name = gateway.networks.require(body.model)
    return ComputedResponse(partial(_compute, gateway, usage, name, body, audio), gateway.shutdown)


async def _read(request: Request) -> tuple[TranscriptionRequest, bytes]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != MEDIA_TYPE:
        raise HttpProblem(
            415, f"the content type must be {MEDIA_TYPE}", code="unsupported_media_type"
        )
    if not is_installed("python_multipart"):
        raise HttpProblem(
            501, "this gateway lacks the extra `audio`: pip install 'nesa-node[audio]'"
        )
    limits = {"max_files": 1, "max_fields": MAX_FIELDS, "max_part_size": MAX_FIELD_BYTES}
    try:
        async with request.form(**limits) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise invalid_request(
                    "file is required", param="file", code="missing_required_parameter"
                )
            fields = {key: value for key, value in form.items() if key != "file"}
            return parse_fields(TranscriptionRequest, fields), await file.read()
    except HTTPException as error:
        raise invalid_request(f"the form cannot be read: {error.detail}") from error


async def _compute(
    gateway: Gateway,
    usage: UsageCounter,
    name: str,
    body: TranscriptionRequest,
    audio: bytes,
) -> dict[str, Any] | str:
    usage.start(name, 0)
    work = partial(_transcribe, audio=audio, language=body.language)
    text = await gateway.networks.run(name, TASK, work)
    usage.charge(1 + len(text) // CHARACTERS_PER_TOKEN)
    return text if body.response_format == "text" else {"text": text}


def _transcribe(listener: Pipeline, audio: bytes, language: str | None) -> str:
    options = {} if language is None else {"generate_kwargs": {"language": language}}
    return str(listener(audio, **options)["text"])
