"""All messages, and their bytes.

A message is a MessagePack map with its name under `t`. Unknown fields are ignored, so that minor
versions interoperate. Every field is bounded, so that a decoded message needs no further checks of
its sizes.
"""

from __future__ import annotations

import msgspec

from nesa_node.compression import tensors
from nesa_node.compression.tensors import TensorMeta
from nesa_node.core.errors import FrameError, ProtocolError
from nesa_node.core.logging import escape_text
from nesa_node.swarm.protocol.adapter_messages import (
    AdapterChunk,
    AdapterFiles,
    AdapterGet,
    AdapterHeld,
    AdapterPut,
    AdapterQuery,
    AdapterStored,
    AdapterWanted,
)
from nesa_node.swarm.protocol.attest_messages import Attest, Attested
from nesa_node.swarm.protocol.graph_messages import (
    GraphCancel,
    GraphFailed,
    GraphOpen,
    GraphOpened,
    GraphOutput,
    GraphRun,
    GraphValues,
    PlanPart,
    PlanRequest,
    payload_bytes,
)
from nesa_node.swarm.protocol.messages import (
    Busy,
    Cancel,
    Close,
    Closed,
    ErrorMessage,
    HandedOver,
    HandOver,
    Leaving,
    Link,
    Linked,
    Message,
    Open,
    Opened,
    Output,
    Pages,
    Ping,
    Pong,
    Probe,
    PushOpen,
    PushOpened,
    QuantizedPages,
    Received,
    Reorder,
    Reordered,
    Rollback,
    RolledBack,
    Step,
    Sync,
    Synced,
    TransferOpen,
    TransferOpened,
)
from nesa_node.swarm.protocol.private_messages import (
    EncryptedInput,
    EncryptedOutput,
    MaskedInput,
    MaskedOutput,
    PrivateMessage,
    PrivateOpen,
    PrivateOpened,
    RotationKey,
)
from nesa_node.swarm.protocol.seal_messages import (
    Disclose,
    Disclosed,
    Opening,
    OpeningOffer,
    OpeningTaken,
    OpeningWanted,
    Seal,
    SealRequest,
)
from nesa_node.swarm.protocol.shard_messages import (
    ShardDrop,
    ShardDropped,
    ShardHeld,
    ShardPart,
    ShardPut,
    ShardQuery,
    ShardRename,
    ShardWanted,
)
from nesa_node.swarm.protocol.training_messages import (
    TrainApplied,
    TrainApply,
    TrainBackward,
    TrainBegan,
    TrainBegin,
    TrainCollect,
    TrainFetch,
    TrainForward,
    TrainGradient,
    TrainGradients,
    TrainLend,
    TrainLent,
    TrainNeed,
    TrainNorm,
    TrainNormed,
    TrainOpen,
    TrainOpened,
    TrainOutput,
    TrainParameters,
    TrainPull,
    TrainReduced,
    TrainRestored,
    TrainState,
    TrainTensor,
)

AnyMessage = (
    Open | Opened | Busy | Link | Linked | PushOpen | PushOpened | Step | Output | Rollback
    | RolledBack | Ping | Pong | Leaving | Cancel | Close | Closed | ErrorMessage | HandOver
    | HandedOver | TransferOpen | TransferOpened | Pages | QuantizedPages | Sync | Synced
    | Reorder | Reordered | Probe | Received
    | SealRequest | Seal | Disclose | Disclosed
    | OpeningOffer | OpeningWanted | Opening | OpeningTaken
    | TrainOpen | TrainOpened | TrainBegin | TrainBegan | TrainForward | TrainOutput
    | TrainBackward | TrainGradient | TrainNorm | TrainNormed | TrainApply | TrainApplied
    | TrainCollect | TrainGradients | TrainReduced | TrainFetch | TrainParameters
    | TrainNeed | TrainLend | TrainLent
    | TrainPull | TrainState | TrainTensor | TrainRestored
    | AdapterQuery | AdapterHeld | AdapterGet | AdapterFiles
    | AdapterPut | AdapterWanted | AdapterChunk | AdapterStored
    | Attest | Attested
    | GraphOpen | GraphOpened | GraphRun | GraphCancel | GraphValues | GraphOutput | GraphFailed
    | PlanRequest | PlanPart
    | PrivateOpen | PrivateOpened | RotationKey | EncryptedInput | EncryptedOutput
    | MaskedInput | MaskedOutput
    | ShardPut | ShardWanted | ShardPart | ShardQuery | ShardRename | ShardDrop | ShardHeld
    | ShardDropped
)  # fmt: skip

_WithTensor = (
    Step | Output | Pages | Probe | Disclosed | Opening
    | TrainForward | TrainOutput | TrainBackward | TrainGradient | TrainTensor
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode_message(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_message(header: bytes | bytearray | memoryview) -> AnyMessage:
    """Decode a header. Raises `FrameError` for anything but one well-formed, bounded message.

    Texts for people are made plain: control characters are escaped (`core/logging.py`).
    """
    try:
        return _with_plain_text(_decoder.decode(header))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        words = escape_text(str(error)[:200])
        raise FrameError(f"not a message of this protocol: {words}") from None


def _with_plain_text(message: AnyMessage) -> AnyMessage:
    match message:
        case Busy():
            return msgspec.structs.replace(message, message=escape_text(message.message))
        case ErrorMessage() | GraphFailed():
            return msgspec.structs.replace(
                message, code=escape_text(message.code), message=escape_text(message.message)
            )
        case _:
            return message


def tensor_of(message: Message) -> TensorMeta | None:
    """Description of the tensor that follows `message`; None if none follows."""
    return message.tensor if isinstance(message, _WithTensor) else None


def payload_nbytes(message: Message, *, max_bytes: int) -> int:
    """Bytes that follow `message`, before they are read.

    Raises `ProtocolError("bad_tensor")` for more than `max_bytes`, and for impossible tensors.
    """
    if isinstance(message, GraphRun | GraphValues | GraphOutput):
        return payload_bytes(message.values, max_bytes=max_bytes)
    if isinstance(message, PrivateMessage | ShardPart | QuantizedPages):
        if message.nbytes > max_bytes:
            raise ProtocolError(
                "bad_tensor", f"{message.nbytes} bytes; at most {max_bytes} are taken"
            )
        return message.nbytes
    meta = tensor_of(message)
    return 0 if meta is None else tensors.check_meta(meta, max_bytes=max_bytes)
