"""Declaration of a setting: its field, flag and type, default paths, and checks of its text.

A type says how a setting reads text, checks it, and is shown in help and error messages. Files that
users name may begin with `~` and are read with a size limit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, StringConstraints
from pydantic.fields import FieldInfo

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.settings.addresses import HttpAddress, check_dialable, to_multiaddress
from nesa_node.core.settings.choices import FlagGroup, PoolQuantType, QuantType
from nesa_node.core.settings.noise_spec import PRIVATE_FORMAT, check_private


def user_path(path: str | Path) -> Path:
    """`path` with `~` and `~name` expanded. Raises `ConfigError` for an unknown home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise ConfigError(f"no home folder is known for {user}: give a path without it") from None


def read_limited(path: Path, most_chars: int) -> str:
    """Read a UTF-8 file. Raises `OSError`, `UnicodeDecodeError`, and `ConfigError` if it is longer.

    The limit applies while reading: devices and pipes report no size and may be endless.
    """
    with path.open(encoding="utf-8") as file:
        text = file.read(most_chars + 1)
    if len(text) > most_chars:
        raise ConfigError(f"{path} has more than {most_chars} characters")
    return text


MIN_API_KEY_CHARS = 8
MAX_API_KEY_CHARS = 512
_MAX_SECRET_CHARS = 65_536
_HEADER_PATTERN = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class ValueFormat:
    """How values of a type are written: in help, and in error messages.

    `expected` is None where pydantic's error message explains it.
    """

    metavar: str
    expected: str | None = None


def find_format(field: FieldInfo) -> ValueFormat | None:
    """The outermost `ValueFormat` of a field's type."""
    return next((f for part in (*field.metadata, field.annotation) if (f := _find(part))), None)


def _find(part: Any) -> ValueFormat | None:
    if isinstance(part, ValueFormat):
        return part
    args = get_args(part)  # of `Annotated`: the type, then its metadata
    return next((f for inner in (*args[1:], *args[:1]) if (f := _find(inner))), None)


def _parsed_by(parse: Callable[[str], object]) -> BeforeValidator:
    """Validator that parses text, and leaves values of other types to pydantic."""

    def read(value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return parse(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(read)


def _read_address(text: str) -> str:
    """Convert `host:port` to a multiaddress; its peer id is looked up on joining the swarm."""
    address = to_multiaddress(text)
    check_dialable(address)
    return address


def _read_secret(value: str) -> str:
    """Replace `@PATH` by the content of that file: arguments are visible in process lists.

    Strips white space, such as the line break at a file's end.
    """
    if value.startswith("@"):
        try:
            value = read_limited(user_path(value[1:]), _MAX_SECRET_CHARS)
        except OSError as error:
            raise ValueError(f"cannot read {value[1:]}: {error.strerror}") from None
    if not (value := value.strip()):
        raise ValueError("it is empty")
    return value


def _check_api_key(value: SecretStr) -> SecretStr:
    """Check that an HTTP header can carry the key and that it is too long to guess."""
    text = value.get_secret_value()
    if not MIN_API_KEY_CHARS <= len(text) <= MAX_API_KEY_CHARS or not _HEADER_PATTERN.fullmatch(
        text
    ):
        raise ValueError(
            f"it must have {MIN_API_KEY_CHARS} to {MAX_API_KEY_CHARS} printable ASCII characters "
            "and no space"
        )
    return value


def _reject_bool(value: object) -> object:
    """Reject booleans where a number is wanted: Python counts `True` as 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


_NUMBER = BeforeValidator(_reject_bool)
# An environment variable holds a list as text, separated by commas or white space.
_LIST = _parsed_by(lambda text: text.replace(",", " ").split())


def _split_words(value: object) -> object:
    """Split text, and each text of a list, at commas: a repeated flag's values may have some."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    return tuple(word for part in parts for word in part.replace(",", " ").split())


_WORDS = BeforeValidator(_split_words)

PositiveInt = Annotated[int, _NUMBER, Field(ge=1), ValueFormat("INT")]
NonNegativeInt = Annotated[int, _NUMBER, Field(ge=0), ValueFormat("INT")]
Gibibytes = Annotated[float, _NUMBER, Field(gt=0, allow_inf_nan=False), ValueFormat("GIB")]
NonNegativeGibibytes = Annotated[
    float, _NUMBER, Field(ge=0, allow_inf_nan=False), ValueFormat("GIB")
]
# Shorter intervals would keep a core busy; Python's threads cannot wait longer than 9.2e9 s.
Seconds = Annotated[
    float, _NUMBER, Field(ge=0.01, le=1e9, allow_inf_nan=False), ValueFormat("SECONDS")
]

ModelName = Annotated[
    str, ValueFormat("MODEL", "a local folder or GGUF file, or the name of a model on the hub")
]
ModelNames = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], _LIST, ValueFormat("MODEL")]
ModelPatterns = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=128)], ...],
    _LIST,
    ValueFormat("PATTERN"),
]


def _read_quant_type(value: object) -> object:
    """Read hyphens as underscores: names are those of the DHT's records, which have no hyphens."""
    return value.replace("-", "_") if isinstance(value, str) else value


QuantName = Annotated[
    QuantType,
    BeforeValidator(_read_quant_type),
    ValueFormat("none|int8|nf4|llm_int8"),
]
QuantTypes = Annotated[
    tuple[PoolQuantType, ...],
    _WORDS,
    Field(min_length=1),
    ValueFormat("NAMES", "none, int8 or nf4"),
]
FamilyNames = Annotated[
    tuple[Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,32}$")], ...],
    _WORDS,
    Field(max_length=16),
    ValueFormat("NAMES", "at most 16 families like llama,qwen2"),
]
Share = Annotated[
    float,
    _NUMBER,
    Field(ge=1e-6, le=1, allow_inf_nan=False),
    ValueFormat("SHARE", "a number from 0 to 1"),
]
AuditRate = Annotated[
    float,
    _NUMBER,
    _parsed_by(lambda text: float(text[:-1]) / 100 if text.endswith("%") else float(text)),
    Field(ge=0, le=1, allow_inf_nan=False),
    ValueFormat("SHARE", 'a share like "5%" or 0.05'),
]
_HOUR = Annotated[int, Field(ge=0, le=24)]
Hours = Annotated[
    tuple[_HOUR, _HOUR],
    _parsed_by(lambda text: tuple(text.split("-"))),
    ValueFormat("FROM-TO", 'two hours of the day like "20-8"'),
]
DeviceName = Annotated[
    str,
    StringConstraints(pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$"),
    ValueFormat("DEVICE", "auto, cpu, cuda, cuda:N or mps"),
]
PrivateMode = Annotated[str, _parsed_by(check_private), ValueFormat("MODE", PRIVATE_FORMAT)]
BlockCount = Annotated[
    PositiveInt | Literal["auto"],
    ValueFormat("INT|auto", 'a whole number of at least 1, or "auto"'),
]
BlockRange = Annotated[
    Span, _parsed_by(Span.parse), ValueFormat("A:B", 'a half-open range like "0:10"')
]
OwnBlocks = Annotated[
    tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]],
    # A TOML file may also have a list of two numbers.
    _parsed_by(lambda text: tuple(text.split(","))),
    ValueFormat("FIRST,LAST", 'two numbers of blocks like "2,2"'),
]
Location = Annotated[
    tuple[Annotated[float, Field(ge=-90, le=90)], Annotated[float, Field(ge=-180, le=180)]],
    # A TOML file may also have a list of two numbers.
    _parsed_by(lambda text: tuple(text.split(","))),
    ValueFormat("LAT,LON", 'degrees of latitude and longitude like "52.5,13.4"'),
]
PublicName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f]+$"),
    ValueFormat("NAME", "1 to 64 printable characters"),
]
FilePath = Annotated[Path, _parsed_by(user_path), ValueFormat("PATH", "a path")]
FolderPaths = Annotated[
    tuple[Annotated[Path, _parsed_by(user_path)], ...], _LIST, ValueFormat("FOLDER")
]
Secret = Annotated[SecretStr, _parsed_by(_read_secret), ValueFormat("SECRET")]
ApiKeyText = Annotated[Secret, AfterValidator(_check_api_key)]

HttpAddressText = Annotated[
    str, _parsed_by(lambda text: str(HttpAddress.parse(text))), ValueFormat("HOST:PORT")
]
CollectorUrl = Annotated[
    str,
    StringConstraints(max_length=512, pattern=r"^https?://[^\s/?#]+/?$"),
    ValueFormat("URL", "an address like http://127.0.0.1:4318"),
]
_HOST_NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9-]+)*$"
HostNames = Annotated[
    tuple[
        Annotated[
            str, StringConstraints(to_lower=True, max_length=253, pattern=_HOST_NAME_PATTERN)
        ],
        ...,
    ],
    _LIST,
    ValueFormat("NAME", "names like gateway.example.org, without port"),
]
_ORIGIN_PATTERN = r"^[a-z][a-z0-9+.-]*://[^/\s*,]+$"
"""Scheme, host and optional port, as browsers send it; no path, and no `*`."""
Origins = Annotated[
    tuple[Annotated[str, StringConstraints(max_length=300, pattern=_ORIGIN_PATTERN)], ...],
    _LIST,
    ValueFormat("ORIGIN", "origins like https://app.example.org, with nothing after the host"),
]
Networks = Annotated[
    tuple[Annotated[str, AfterValidator(lambda text: str(ip_network(text, strict=False)))], ...],
    _LIST,
    ValueFormat("NETWORK", "IP addresses or networks like 10.0.0.0/8"),
]

PeerIds = Annotated[tuple[PeerId, ...], _LIST, ValueFormat("PEER")]
_PEER_ADDRESS_PATTERN = (
    r"^/(ip4|ip6|dns|dns4|dns6)/[^/]+/"
    r"(tcp/[0-9]{1,5}|(tcp|udp)/[0-9]{1,5}(/.+)?/p2p/[1-9A-HJ-NP-Za-km-z]+)$"
)
PeerAddresses = Annotated[
    tuple[
        Annotated[
            str,
            _parsed_by(_read_address),
            StringConstraints(max_length=512, pattern=_PEER_ADDRESS_PATTERN),
        ],
        ...,
    ],
    _LIST,
    ValueFormat(
        "ADDRESS", "addresses like /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW... or 192.0.2.7:4001"
    ),
]
_BIND_ADDRESS_PATTERN = r"^/(ip4|ip6|dns|dns4|dns6)/[^/]+/(tcp|udp)/[0-9]{1,5}(/.*)?$"
_BindAddresses = Annotated[
    tuple[Annotated[str, StringConstraints(max_length=512, pattern=_BIND_ADDRESS_PATTERN)], ...],
    _LIST,
]
ListenAddresses = Annotated[
    _BindAddresses,
    ValueFormat("ADDRESS", "addresses like /ip4/0.0.0.0/tcp/4001 (port 0: any free port)"),
]
AnnouncedAddresses = Annotated[
    _BindAddresses, ValueFormat("ADDRESS", "addresses like /ip4/192.0.2.7/tcp/4001")
]


def default_cache_dir() -> Path:
    return _user_dir("XDG_CACHE_HOME", "~/.cache")


def default_decisions_path() -> Path:
    return _state_dir() / "decisions.db"


def default_audits_path() -> Path:
    return _state_dir() / "audits.db"


def default_snapshots_dir() -> Path:
    return _state_dir() / "snapshots"


def default_deployments_dir() -> Path:
    return _state_dir() / "deployments"


def default_keys_path() -> Path:
    return _state_dir() / "keys.json"


def default_known_swarms_dir() -> Path:
    return _state_dir() / "swarms"


def default_identity_path() -> Path:
    return _user_dir("XDG_CONFIG_HOME", "~/.config") / "identity.key"


def _state_dir() -> Path:
    return _user_dir("XDG_STATE_HOME", "~/.local/state")


def _user_dir(variable: str, default: str) -> Path:
    """Our folder in that of the XDG base directory specification."""
    return Path(os.environ.get(variable) or user_path(default)) / "nesa-node"


def setting(
    default: object | Callable[[], object],
    group: FlagGroup,
    text: str,
    *,
    basic: bool = False,
    default_text: str | None = None,
    alias: str | None = None,
) -> Any:
    """A field that is a flag, too: `text` is its help, `group` its heading there.

    `basic` flags are in the short help. `default_text` replaces the default that help shows.
    """
    flag = {"group": group, "basic": basic, "default_text": default_text, "alias": alias}
    if callable(default):
        return Field(default_factory=default, description=text, json_schema_extra=dict(flag))
    return Field(default, description=text, json_schema_extra=dict(flag))


def check_loopback(name: str, address: str | None, example: str, *, allowed: bool) -> None:
    """Raise `ValueError` if other machines could reach an unprotected server at `address`."""
    if address is None or HttpAddress.parse(address).is_loopback or allowed:
        return
    raise ValueError(
        f"{name} {address} can be reached from other machines, without a password; give a loopback "
        f"address such as {example}, or set {name}_beyond_loopback"
    )


def gib_to_bytes(gibibytes: float | None) -> int | None:
    """Whole bytes; None stays None."""
    return None if gibibytes is None else int(gibibytes * 2**30)


def secret_text(value: SecretStr | None) -> str | None:
    """The secret as plain text."""
    return None if value is None else value.get_secret_value()
