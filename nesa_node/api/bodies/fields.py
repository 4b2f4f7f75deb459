"""Types of the fields of request bodies, for validation and for their JSON schema.

Validation is strict: a string is no number, and true is not 1. 5.0 is accepted as an integer,
since JSON does not distinguish them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError
from pydantic_core.core_schema import no_info_plain_validator_function

UNSUPPORTED = "unsupported_parameter"
_EXACT = 2**53
_MAX_TEXT = 4 << 20
_MAX_FIELDS = 256
"""More than any schema has. pydantic would create an error for each unknown field."""


class Body(BaseModel):
    """JSON object of a request, without unknown fields. `null` equals an absent field."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > _MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", "it has too many fields")
        return value


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _real(value: object) -> object:
    """Clamp integers beyond 2**53, which would overflow in the comparison with a float bound."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _EXACT:
        return float(_EXACT) if value > 0 else -float(_EXACT)
    return value


def few_entries(most: int) -> BeforeValidator:
    """Validator that refuses a mapping of more than `most` entries before they are validated.

    `max_length` alone is checked after all entries, each of which may add an error.
    """

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticKnownError(
                "too_long",
                {"field_type": "Dictionary", "max_length": most, "actual_length": len(value)},
            )
        return value

    return BeforeValidator(check)


def required() -> PydanticCustomError:
    """Error of a missing field that other fields require; reported like any missing field."""
    return PydanticCustomError("missing", "it is required")


class Only:
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
        raise PydanticCustomError(UNSUPPORTED, "this gateway does not support it")


# Annotated after the bounds in each type: pydantic runs the last validator first.
Whole = BeforeValidator(_whole)
Real = BeforeValidator(_real)

Count = Annotated[int, Field(ge=1, le=_EXACT), Whole]
CountOrNone = Annotated[int, Field(ge=0, le=_EXACT), Whole]
TokenId = Annotated[int, Field(ge=0, lt=2**31), Whole]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), Whole]
Temperature = Annotated[float, Field(ge=0, le=2), Real]
Share = Annotated[float, Field(ge=0, le=1), Real]
MinP = Annotated[float, Field(ge=0, le=1), Real]
Penalty = Annotated[float, Field(ge=-2, le=2), Real]
Repetition = Annotated[float, Field(gt=0, le=10), Real]
Bias = Annotated[float, Field(ge=-100, le=100), Real]
TopK = Annotated[int, Field(ge=-1, le=_EXACT), Whole]
TopLogprobs = Annotated[int, Field(ge=0, le=20), Whole]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Text = Annotated[str, Field(max_length=_MAX_TEXT)]
TextIfNeeded = Annotated[Text | None, Field(validate_default=True)]
"""Text that a field validator may require (`required`), so its default is validated, too."""
Name = Annotated[str, Field(min_length=1, max_length=512)]
ModelName = Annotated[Name | None, Field(description="may be left out where one model is served")]
Label = Annotated[str, Field(max_length=4096)]
Nothing = Annotated[Any, Only()]
