"""Error classes of the project, and errors about optional packages.

::

    NesaError
    ├── ConfigError                 a flag, variable, file or key is wrong
    ├── ModelError
    │   ├── ModelNotFoundError      no such folder or hub name, or a file of it is missing
    │   ├── UnsupportedModelError   a family, quantization or dtype that cannot be served
    │   ├── UnsafeCheckpointError   pickled weights
    │   ├── CorruptCheckpointError  a file's hash, header or tensor is not what it should be
    │   ├── ModelMismatchError      the swarm serves another copy of the model
    │   └── AdapterError            a folder that is no adapter, or none of this model; none found
    ├── ResourceError
    │   ├── InsufficientMemoryError
    │   ├── DiskLimitError
    │   ├── CacheFullError          a sequence outgrew its cache reservation
    │   └── OutputError             stdout or stderr is full or gone
    ├── SwarmError
    │   ├── IdentityError           the key file cannot be used
    │   ├── AddressInUseError       another process listens on that port
    │   ├── BootstrapError          none of the initial peers answered
    │   ├── PeerUnreachableError    a peer could not be dialled or went silent
    │   │   └── NoAddressError      no address of it is known here
    │   ├── RecordError             an invalid DHT record
    │   ├── AttestationError        hardware evidence that is missing, or does not hold
    │   ├── MissingBlocksError      no node holds some blocks of the model
    │   └── WrongActivationsError   an audit found what a node computed to be wrong
    ├── ProtocolError               a message broke the protocol; `code` is its name on the wire
    │   ├── FrameError              bytes that are no message
    │   ├── VersionMismatchError
    │   ├── StreamClosedError       the other side ended the stream
    │   ├── BusyError               no capacity now; retry after `retry_after_s`
    │   ├── RemoteError             the peer answered with an error of its own
    │   └── RefusedError            all nodes with some blocks refused this client or request
    ├── ContextLengthError          more tokens than the model or the route can hold
    └── UnsupportedFeatureError     a generation option that a swarm cannot offer

The command line exits with `exit_code` of the error's class; `docs/exit-codes.md` lists them.
Extras of `pyproject.toml` install optional packages.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Literal


class NesaError(Exception):
    """Base of the project's errors. Messages say what went wrong, where, and what to do next."""

    exit_code = 1


class ConfigError(NesaError):
    exit_code = 2


class ModelError(NesaError):
    exit_code = 3


class ModelNotFoundError(ModelError):
    pass


class UnsupportedModelError(ModelError):
    pass


class UnsafeCheckpointError(ModelError):
    pass


class CorruptCheckpointError(ModelError):
    pass


class ModelMismatchError(ModelError):
    pass


class AdapterError(ModelError):
    pass


class ResourceError(NesaError):
    exit_code = 4


class InsufficientMemoryError(ResourceError):
    pass


class DiskLimitError(ResourceError):
    pass


class CacheFullError(ResourceError):
    pass


class OutputError(ResourceError):
    pass


class SwarmError(NesaError):
    exit_code = 5


class IdentityError(SwarmError):
    pass


class AddressInUseError(SwarmError):
    pass


class BootstrapError(SwarmError):
    pass


class PeerUnreachableError(SwarmError):
    pass


class NoAddressError(PeerUnreachableError):
    """No address of the peer is known here. Not the peer's failure, so it is not reported."""


class RecordError(SwarmError):
    """An invalid record, to be dropped. `reason` is the label under which `Directory` counts it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


AttestationFault = Literal[
    "malformed", "certificate", "signature", "expired", "status", "binding", "measurement", "absent"
]


class AttestationError(SwarmError):
    """Hardware evidence that is missing or does not hold; `fault` says in which respect."""

    def __init__(self, fault: AttestationFault, message: str) -> None:
        super().__init__(message)
        self.fault: AttestationFault = fault


class MissingBlocksError(SwarmError):
    """No node serves the half-open block ranges `missing` (ascending)."""

    exit_code = 6

    def __init__(self, missing: Sequence[tuple[int, int]], message: str) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class WrongActivationsError(SwarmError):
    """What `peer` computed of `blocks` (half-open) is wrong, from token `position` of a row on.

    The position is None where only the errors of many tokens together are too large, or the seal is
    wrong. `peer` is None where the error may be another node's.
    """

    exit_code = 11

    def __init__(
        self, peer: str | None, blocks: tuple[int, int], position: int | None, message: str
    ) -> None:
        super().__init__(message)
        self.peer = peer
        self.blocks = blocks
        self.position = position


class ProtocolError(NesaError):
    """A violation of the protocol. `code` is sent to the peer; `docs/protocol.md` lists codes."""

    exit_code = 7

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class FrameError(ProtocolError):
    def __init__(self, message: str) -> None:
        super().__init__("bad_frame", message)


class VersionMismatchError(ProtocolError):
    def __init__(self, message: str) -> None:
        super().__init__("version_mismatch", message)


class StreamClosedError(ProtocolError):
    def __init__(self, message: str) -> None:
        super().__init__("closed", message)


class BusyError(ProtocolError):
    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__("busy", message)
        self.retry_after_s = retry_after_s


class RemoteError(ProtocolError):
    pass


class RefusedError(ProtocolError):
    pass


class ContextLengthError(NesaError):
    exit_code = 8


class UnsupportedFeatureError(NesaError):
    exit_code = 9


NODE_MODULES = ("bitsandbytes", "gudhi", "sklearn")
"""Modules of the extra `node`; clients and gateways do not need them."""


@cache
def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    return importlib.util.find_spec(module) is not None


def require_training() -> None:
    """Check that PEFT is installed. Raises `ConfigError` that says what to install."""
    if not is_installed("peft"):
        raise ConfigError(
            "fine-tuning needs peft: pip install 'nesa-node[train]', or '.[train]' in a clone"
        )


def require_node(use: str, *modules: str) -> None:
    """Check that `modules`, by default all of the extra `node`, are installed for `use`.

    Raises `ConfigError` that says what to install.
    """
    missing = [module for module in modules or NODE_MODULES if not is_installed(module)]
    if missing:
        raise ConfigError(
            f"{use} needs {', '.join(missing)}: pip install 'nesa-node[node]', "
            "or '.[node]' in a clone"
        )
