"""What the fields of request bodies may hold, as pydantic types whose JSON schema says the same.

Bodies are read strictly: text is no number, true is no 1. JSON has no integers, so 5.0 is one.
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
"""More than any object here has: each unknown one would be told as an error of its own."""


class Body(BaseModel):
    """A JSON object with these fields and no others. `null` is as good as a field left out."""

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
    """Integers that no float holds would overflow in the comparison with a bound."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _EXACT:
        return float(_EXACT) if value > 0 else -float(_EXACT)
    return value


def few_entries(most: int) -> BeforeValidator:
    """For a mapping whose keys are free: refuses one with more than `most` before it is read.

    `max_length` alone is checked after all entries, each wrong one of which is an error of its own.
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
    """For a field that other fields make necessary; told like any that is missing."""
    return PydanticCustomError("missing", "it is required")


class Only:
    """A field of OpenAI's that is accepted where it changes nothing: as null or one of `values`."""

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


# Named after the bounds in each type: what is named last is asked first.
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
"""For a validator that knows whether it is `required`."""
Name = Annotated[str, Field(min_length=1, max_length=512)]
ModelName = Annotated[Name | None, Field(description="may be left out where one model is served")]
Label = Annotated[str, Field(max_length=4096)]
Nothing = Annotated[Any, Only()]
