"""Request bodies: types of their fields, and their parsing; `web/body_reader.py` limits their size.

Validation is strict: a string is no number, and true is not 1. 5.0 is accepted as an integer,
since JSON does not distinguish them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Depends
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import (
    CoreSchema,
    ErrorDetails,
    PydanticCustomError,
    PydanticKnownError,
    from_json,
)
from pydantic_core.core_schema import no_info_plain_validator_function
from starlette.requests import Request

from nesa_node.api.generation.tokenization import offload_if_large
from nesa_node.web.problem import HttpProblem, invalid_request

UNSUPPORTED_CODE = "unsupported_parameter"
_MAX_EXACT_INT = 2**53
_MAX_TEXT_CHARS = 4 << 20
_MAX_FIELDS = 256
"""More than any schema has. pydantic would create an error for each unknown field."""


class RequestBody(BaseModel):
    """JSON object of a request, without unknown fields. `null` equals an absent field."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _limit_fields(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > _MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", "it has too many fields")
        return value


def _float_to_int(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _clamp_int(value: object) -> object:
    """Clamp integers beyond 2**53, which would overflow in the comparison with a float bound."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _MAX_EXACT_INT:
        return float(_MAX_EXACT_INT) if value > 0 else -float(_MAX_EXACT_INT)
    return value


def limit_entries(max_entries: int) -> BeforeValidator:
    """Validator that refuses larger mappings before their entries are validated.

    `max_length` alone is checked after all entries, each of which may add an error.
    """

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > max_entries:
            sizes = {"max_length": max_entries, "actual_length": len(value)}
            raise PydanticKnownError("too_long", {"field_type": "Dictionary", **sizes})
        return value

    return BeforeValidator(check)


def accept_part_types(*accepted: str) -> BeforeValidator:
    """Validator that refuses parts of a message whose `type` is another one."""

    def check(value: object) -> object:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in accepted:
            raise PydanticCustomError(
                "unsupported_content",
                "parts of this type are not supported: the model reads text only",
            )
        return value

    return BeforeValidator(check)


def missing_field_error() -> PydanticCustomError:
    """Error of a missing field that other fields require; reported like any missing field."""
    return PydanticCustomError("missing", "it is required")


class AcceptedValues:
    """OpenAI's field without effect here: accepts null and `values`, and refuses all else."""

    def __init__(self, *values: object) -> None:
        self._values = (None, *values)

    def __get_pydantic_core_schema__(
        self, _source: object, _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, _schema: CoreSchema, _handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": list(self._values)}

    def _check(self, value: object) -> object:
        if any(type(value) is type(one) and value == one for one in self._values):
            return value
        raise PydanticCustomError(UNSUPPORTED_CODE, "this gateway does not support it")


# Annotated after the bounds in each type: pydantic runs the last validator first.
FloatToInt = BeforeValidator(_float_to_int)
ClampedInt = BeforeValidator(_clamp_int)

Count = Annotated[int, Field(ge=1, le=_MAX_EXACT_INT), FloatToInt]
CountOrZero = Annotated[int, Field(ge=0, le=_MAX_EXACT_INT), FloatToInt]
TokenId = Annotated[int, Field(ge=0, lt=2**31), FloatToInt]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), FloatToInt]
Temperature = Annotated[float, Field(ge=0, le=2), ClampedInt]
Probability = Annotated[float, Field(ge=0, le=1), ClampedInt]
PresencePenalty = Annotated[float, Field(ge=-2, le=2), ClampedInt]
RepetitionPenalty = Annotated[float, Field(gt=0, le=10), ClampedInt]
LogitBias = Annotated[float, Field(ge=-100, le=100), ClampedInt]
TopK = Annotated[int, Field(ge=-1, le=_MAX_EXACT_INT), FloatToInt]
TopLogprobs = Annotated[int, Field(ge=0, le=20), FloatToInt]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Text = Annotated[str, Field(max_length=_MAX_TEXT_CHARS)]
ConditionalText = Annotated[Text | None, Field(validate_default=True)]
"""Text that a field validator may require (`required`), so its default is validated, too."""
Name = Annotated[str, Field(min_length=1, max_length=512)]
ModelName = Annotated[Name | None, Field(description="may be left out where one model is served")]
Label = Annotated[str, Field(max_length=4096)]
OnlyNull = Annotated[Any, AcceptedValues()]


B = TypeVar("B", bound=RequestBody)

MAX_CONTAINERS = 256 * 1024
"""Limit on lists and objects of a body; brackets within strings count, too. 8 MiB of empty lists
would take 250 MiB and hold the GIL while they are created."""
MAX_KEYS = 256 * 1024
"""Limit on keys of all objects of a body; look-alikes within strings count, too. Parsing holds the
GIL, for 80 ms at this limit."""
_MESSAGE_SUBJECT = re.compile(r"^(?:Input|List|String|Dictionary) should")
_LENGTH_ERRORS = ("too_long", "too_short")


def body_dependency(kind: type[B]) -> Any:
    """FastAPI dependency that parses the request's body as a `kind`. Raises `HttpProblem`."""

    async def read(request: Request) -> B:
        _require_json_type(request)
        data = await request.body()
        return await offload_if_large(len(data), lambda: parse_body(kind, data))

    reader: Callable[[Request], Awaitable[B]] = read
    return Depends(reader)


def parse_body(kind: type[B], data: bytes) -> B:
    """Parse JSON as a `kind`. Raises `HttpProblem` that names the wrong field."""
    if crowd := find_json_excess(data):
        raise invalid_request(f"the body has more than {crowd}: send less at once")
    try:
        # Refuses NaN, lone surrogates, invalid UTF-8, and nesting beyond 200 levels.
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise invalid_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid_request("the body must be a JSON object", code="invalid_type")
    return parse_fields(kind, value)


def parse_fields(kind: type[B], value: dict[str, Any]) -> B:
    """Read the fields of a body as a `kind`. Raises `HttpProblem` that names the wrong field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise _to_problem(found, value) from None


def find_json_excess(data: bytes) -> str | None:
    """Name of what `data` has too many of to be parsed at once: brackets or keys; None: neither.

    The counts include look-alikes within strings, so they are upper bounds.
    """
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        return f"{MAX_CONTAINERS} brackets that open"
    # White space may precede a colon. Strings have many colons that follow no quote.
    if data.count(b":") > MAX_KEYS and data.translate(None, b" \t\r\n").count(b'":') > MAX_KEYS:
        return f"{MAX_KEYS} keys"
    return None


def _require_json_type(request: Request) -> None:
    """Refuse other content types: browsers send this one cross-origin only after a preflight."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpProblem(
            415, "the content type must be application/json", code="unsupported_media_type"
        )


def _to_problem(details: Sequence[ErrorDetails], value: object) -> HttpProblem:
    """Report the most deeply nested error: in a union it belongs to the branch that was meant.

    Errors of a list's length go first, since only the matching branch of a union checks it.
    """
    found = [(_path_in_value(detail["loc"], value, detail["type"]), detail) for detail in details]
    keys, detail = max(found, key=lambda each: (each[1]["type"] in _LENGTH_ERRORS, len(each[0])))
    param = _format_path(keys)
    kind = detail["type"]
    if kind == "extra_forbidden":
        return invalid_request(f"unknown parameter: {param}", param=param, code="unknown_parameter")
    if kind == UNSUPPORTED_CODE:
        return invalid_request(f"{param}: {detail['msg']}", param=param, code=UNSUPPORTED_CODE)
    if kind == "missing":
        return invalid_request(
            f"{param} is required", param=param, code="missing_required_parameter"
        )
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    words = _MESSAGE_SUBJECT.sub("it should", detail["msg"].removeprefix("Value error, "))
    words = words.replace(" after validation", "")
    return invalid_request(f"{param or 'the body'}: {words}", param=param or None, code=code)


def _path_in_value(loc: Sequence[int | str], value: Any, kind: str) -> tuple[int | str, ...]:
    """Keys of `loc` that exist in `value`: pydantic's paths also name branches of unions."""
    keys: list[int | str] = []
    for number, key in enumerate(loc):
        if _is_key_of(key, value):
            value = value[key]
        elif not (kind == "missing" and number == len(loc) - 1):
            continue
        keys.append(key)
    return tuple(keys)


def _is_key_of(key: int | str, value: object) -> bool:
    if isinstance(value, list):
        return isinstance(key, int) and key < len(value)
    return isinstance(value, dict) and key in value


def _format_path(keys: Sequence[int | str]) -> str:
    """Path of a field as text, such as `messages[0].content`; at most 200 characters."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".")[:200]
