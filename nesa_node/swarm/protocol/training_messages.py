"""Messages of training sessions, which `docs/protocol.md` specifies.

A client trains adapters of a node's span on a stream of its own. Hidden states and gradients have
the tokens of all texts of a micro-batch, one text after the other, without padding: [T, D].
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from nesa_node.compression.tensors import TensorMeta
from nesa_node.swarm.protocol.messages import (
    MAX_EPOCH,
    MAX_ROWS,
    MAX_TOKENS,
    BlockRange,
    CodecName,
    Codecs,
    Epoch,
    Message,
    Seconds,
    Version,
)

MAX_SPEC_BYTES = 32 * 1024
MAX_MICRO_BATCHES = 1 << 16
"""Of one step."""
MAX_TEXTS = 4096
"""Texts that one row packs."""
MAX_STATE_TENSORS = 1 << 20
MAX_PARTITIONS = 64
MAX_SQUARED_NORM = 1e100
"""Above what gradients in float32 can have, and finite in sums over nodes."""

MAX_NOTICE_BYTES = 8192

StepNumber = Epoch
PlanDigest = Annotated[bytes, Meta(min_length=32, max_length=32)]
BlockNumber = Annotated[int, Meta(ge=0, le=1 << 16)]
MicroNumber = Annotated[int, Meta(ge=0, lt=MAX_MICRO_BATCHES)]
TextLengths = Annotated[
    tuple[
        Annotated[
            tuple[Annotated[int, Meta(ge=1, le=MAX_TOKENS)], ...],
            Meta(min_length=1, max_length=MAX_TEXTS),
        ],
        ...,
    ],
    Meta(min_length=1, max_length=MAX_ROWS),
]
"""By row, the tokens of each text in it. Several texts in a row only where there is one row."""


class TrainOpen(Message, frozen=True, tag="train_open"):
    """Client to node: create adapters of `blocks` and their optimizer."""

    version: Version
    model: Annotated[str, Meta(max_length=256)]
    session: Annotated[bytes, Meta(min_length=16, max_length=16)]
    blocks: BlockRange
    spec: Annotated[bytes, Meta(max_length=MAX_SPEC_BYTES)]
    """Adapters, optimizer and seed (`engine/training/training_spec.py`)."""
    notice: Annotated[bytes, Meta(max_length=MAX_NOTICE_BYTES)]
    """The client's signed `TrainingNotice` (`swarm/dht/training_notices.py`)."""
    plan: PlanDigest
    """Which of its plans this session is."""
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    """Tokens of one micro-batch, with the padding of its rows, at most."""
    max_kept_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    """Tokens of micro-batches between their forward and backward, at most."""
    membership: Annotated[bytes, Meta(max_length=64)] = b""
    quality: CodecName = "exact"
    """Lowest quality that hidden states and gradients may be compressed to."""
    codecs: Codecs = ()
    """Codecs that the client decodes beside "none"."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """What the nodes of a span divide: 1 the optimizer's state; 2 gradients too, which are sent
    with each micro-batch; 3 also the parameters."""
    partitions: Annotated[int, Meta(ge=1, le=MAX_PARTITIONS)] = 1
    """Nodes that divide it."""
    partition: Annotated[int, Meta(ge=0, lt=MAX_PARTITIONS)] = 0
    """Which part is this node's (`Partition` in `engine/training/training_state.py`)."""


class TrainOpened(Message, frozen=True, tag="train_opened"):
    """Node to client: the adapters have their initial values; no step was applied."""

    version: Version
    step_timeout_s: Seconds
    codecs: Codecs = ()
    """Codecs that the node decodes beside "none"."""


class TrainBegin(Message, frozen=True, tag="train_begin"):
    """Begin a step, or begin it again: its micro-batches so far are forgotten."""

    step: StepNumber
    plan: PlanDigest
    """Of `train_open`; the answer repeats it."""


class TrainBegan(Message, frozen=True, tag="train_began"):
    step: StepNumber
    plan: PlanDigest


class TrainForward(Message, frozen=True, tag="train_forward"):
    """Hidden states [T, D] of a micro-batch."""

    step: StepNumber
    micro: MicroNumber
    texts: TextLengths
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    """Of dropout."""
    tensor: TensorMeta
    keep: bool = True
    """Whether a backward follows. Without it there is no dropout."""


class TrainOutput(Message, frozen=True, tag="train_output"):
    """Output [T, D] of the span's blocks."""

    step: StepNumber
    micro: MicroNumber
    tensor: TensorMeta


class TrainBackward(Message, frozen=True, tag="train_backward"):
    """Gradient [T, D] of a micro-batch's output; micro-batches come in the order 0, 1, 2, ..."""

    step: StepNumber
    micro: MicroNumber
    tensor: TensorMeta


class TrainGradient(Message, frozen=True, tag="train_gradient"):
    """Gradient [T, D] of a micro-batch's input."""

    step: StepNumber
    micro: MicroNumber
    tensor: TensorMeta


class TrainNorm(Message, frozen=True, tag="train_norm"):
    """Ask for the squared norm of the step's gradients."""

    step: StepNumber


class TrainNormed(Message, frozen=True, tag="train_normed"):
    step: StepNumber
    squared_norm: Annotated[float, Meta(ge=0, le=MAX_SQUARED_NORM)]


class TrainCollect(Message, frozen=True, tag="train_collect"):
    """Ask for the step's gradients of adapters, which the node then forgets.

    `micro_batches` must have gone backward.
    """

    step: StepNumber
    micro_batches: Annotated[int, Meta(ge=1, le=MAX_MICRO_BATCHES)]


class TrainGradients(Message, frozen=True, tag="train_gradients"):
    """Gradients of adapters: `tensors` `train_tensor`s follow.

    To the client those of this node, to a node the sum over the span's nodes, of the parameters
    that it updates.
    """

    step: StepNumber
    tensors: Annotated[int, Meta(ge=0, le=MAX_STATE_TENSORS)]


class TrainReduced(Message, frozen=True, tag="train_reduced"):
    """Node to client: the gradients that were sent are those of the step."""

    step: StepNumber


class TrainApply(Message, frozen=True, tag="train_apply"):
    """Update the adapters by the gradients times `scale`."""

    step: StepNumber
    micro_batches: Annotated[int, Meta(ge=0, le=MAX_MICRO_BATCHES)]
    learning_rate: Annotated[float, Meta(ge=0, le=1e6)]
    scale: Annotated[float, Meta(ge=0, le=1e6)]


class TrainApplied(Message, frozen=True, tag="train_applied"):
    step: StepNumber


class TrainFetch(Message, frozen=True, tag="train_fetch"):
    """Ask for the parameters that the last of `applied` steps has changed."""

    applied: StepNumber


class TrainParameters(Message, frozen=True, tag="train_parameters"):
    """Parameters after `applied` steps: `tensors` `train_tensor`s follow.

    To the client those that the node has updated, to a node those that other nodes have.
    """

    applied: StepNumber
    tensors: Annotated[int, Meta(ge=0, le=MAX_STATE_TENSORS)]


class TrainNeed(Message, frozen=True, tag="train_need"):
    """Node to client: a pass waits for the parameters of `block` that other nodes have."""

    block: BlockNumber


class TrainLend(Message, frozen=True, tag="train_lend"):
    """Client to node: ask for its parameters of `block`. It is answered at once."""

    block: BlockNumber


class TrainLent(Message, frozen=True, tag="train_lent"):
    """Parameters of `block`: `tensors` `train_tensor`s follow, with no other in between.

    To the client those that the node has, to a node those that it needs.
    """

    block: BlockNumber
    tensors: Annotated[int, Meta(ge=0, le=MAX_STATE_TENSORS)]


class TrainPull(Message, frozen=True, tag="train_pull"):
    """Ask for adapters and optimizer state."""


class TrainState(Message, frozen=True, tag="train_state"):
    """Adapters and optimizer state after `applied` steps: `tensors` `train_tensor`s follow."""

    applied: StepNumber
    tensors: Annotated[int, Meta(ge=0, le=MAX_STATE_TENSORS)]
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """SHA-256 over all names and values (`hash_state`)."""


class TrainTensor(Message, frozen=True, tag="train_tensor"):
    """One tensor of a state, of gradients or of parameters, uncompressed."""

    name: Annotated[str, Meta(min_length=1, max_length=512, pattern="^[!-~]+$")]
    tensor: TensorMeta


class TrainRestored(Message, frozen=True, tag="train_restored"):
    """Node to client: the state, or the parameters, that were sent are in place."""

    applied: Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
