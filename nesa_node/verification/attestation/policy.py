"""What a client accepts as proof of a node's hardware and software: its operator's file.

A JSON or TOML file lists alternatives. A node is accepted if its quotes satisfy all kinds of one::

    {"accept": [
        {"tdx": {"measurements": {"mr_td": ["91eb..."], "rt_mr1": ["a7b2..."]},
                 "statuses": ["SWHardeningNeeded"]}},
        {"snp": {"measurements": {"measurement": ["b07a..."]}, "minimum": {"microcode": 213}},
         "nvidia": {"measurements": {"driver_version": ["550.90.07"]}}}]}
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from nesa_node.core.errors import ConfigError
from nesa_node.verification.attestation.amd import FirmwarePart
from nesa_node.verification.attestation.certificates import read_roots
from nesa_node.verification.attestation.intel import require_dcap
from nesa_node.verification.attestation.quotes import DEBUG, GENUINE, QuoteKind

MAX_POLICY_BYTES = 1 << 20

_INTEL_STATUSES = frozenset(
    {
        "UpToDate",
        "SWHardeningNeeded",
        "ConfigurationNeeded",
        "ConfigurationAndSWHardeningNeeded",
        "OutOfDate",
        "OutOfDateConfigurationNeeded",
        "TDRelaunchAdvised",
        "TDRelaunchAdvisedConfigurationNeeded",
    }
)
"""Statuses of Intel's platforms but "Revoked", which nothing admits."""
_STATUSES: Mapping[QuoteKind, frozenset[str]] = {
    "tdx": _INTEL_STATUSES,
    "sgx": _INTEL_STATUSES,
    "snp": frozenset({GENUINE, DEBUG}),
    "nvidia": frozenset({GENUINE}),
}
_ROOT_FILES: Mapping[QuoteKind, str] = {
    "tdx": "intel.pem",
    "sgx": "intel.pem",
    "snp": "snp.pem",
    "nvidia": "nvidia.pem",
}


def _lower(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(value.lower() for value in values)


Values = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_lower)]


class KindPolicy(BaseModel):
    """What a quote of one kind has to say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    measurements: Annotated[dict[str, Values], Field(min_length=1)]
    """By the name of a measurement, the values that are accepted. Without any measurement, whatever
    runs on genuine hardware would pass."""
    statuses: frozenset[str] = frozenset()
    """Statuses accepted beside "UpToDate" (Intel) and "Genuine"."""
    minimum: dict[FirmwarePart, int] = {}
    """Of AMD: lowest versions of the firmware's parts."""
    roots: str | None = None
    """Certificates to trust in place of the vendor's, as PEM."""

    @property
    def accepted_statuses(self) -> frozenset[str]:
        return self.statuses | {"UpToDate", GENUINE}


class AttestationPolicy(BaseModel):
    """Alternatives of which a node's quotes have to satisfy one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accept: Annotated[tuple[dict[QuoteKind, KindPolicy], ...], Field(min_length=1)]
    unknown_weights: bool = False
    """Whether to accept weights whose digests this client cannot compute, having none of them."""

    @model_validator(mode="after")
    def _check(self) -> AttestationPolicy:
        for alternative in self.accept:
            if not alternative:
                raise ValueError("an alternative names no kind of quote")
            for kind, rule in alternative.items():
                if unknown := sorted(rule.statuses - _STATUSES[kind]):
                    raise ValueError(
                        f"{kind}: statuses {', '.join(unknown)} are unknown; "
                        f"it can be {', '.join(sorted(_STATUSES[kind]))}"
                    )
                if rule.minimum and kind != "snp":
                    raise ValueError(f"{kind}: only snp has a minimum")
                try:
                    roots_of(kind, rule)
                except ValueError as error:
                    raise ValueError(f"{kind}: roots: {error}") from None
        return self


def roots_of(kind: QuoteKind, rule: KindPolicy) -> tuple[bytes, ...]:
    """Trusted certificates as DER: the vendor's, unless the rule has its own.

    Raises `ValueError`.
    """
    return _vendor_roots(kind) if rule.roots is None else read_roots(rule.roots.encode())


@cache
def _vendor_roots(kind: QuoteKind) -> tuple[bytes, ...]:
    return read_roots((files(__package__) / "roots" / _ROOT_FILES[kind]).read_bytes())


def read_policy(path: Path) -> AttestationPolicy:
    """Read a policy from a `.json` or `.toml` file.

    Raises `ConfigError`, also if a kind's quotes cannot be checked with what is installed.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_POLICY_BYTES + 1)
        if len(content) > MAX_POLICY_BYTES:
            raise ConfigError(f"the policy {path} has more than {MAX_POLICY_BYTES} bytes")
        text = content.decode()
        found: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        policy = AttestationPolicy.model_validate(found)
    except OSError as error:
        raise ConfigError(f"cannot read the policy {path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"the policy {path} is wrong at {where}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the policy {path} is neither JSON nor TOML: {error}") from None
    if any(kind in ("tdx", "sgx") for alternative in policy.accept for kind in alternative):
        require_dcap()
    return policy
