"""What arrives on a session's streams: frames, messages, tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from unittest import mock

import msgspec
import torch
from cryptography.utils import CryptographyDeprecationWarning

from nesa_node.compression import tensors
from nesa_node.compression.codecs import (
    FAMILIES,
    allows_codec,
    codec_name,
    expand_codec,
    parse_codec,
)
from nesa_node.compression.tensors import TensorMeta, check_meta
from nesa_node.core.errors import FrameError, NesaError
from nesa_node.core.ids import PeerId
from nesa_node.engine.training.adapters import (
    BottleneckConfig,
    DeepPromptConfig,
    OptimizerConfig,
)
from nesa_node.engine.training.training_spec import Ia3Spec, LoraSpec, TrainingSpec
from nesa_node.swarm.dht.sealing import ListedContradiction, SignedSeal
from nesa_node.swarm.evidence import check_contradiction
from nesa_node.swarm.openings import make_opening, read_opening
from nesa_node.swarm.protocol.adapter_messages import (
    AdapterChunk,
    AdapterFiles,
    AdapterGet,
    AdapterHeld,
    AdapterPut,
    AdapterQuery,
)
from nesa_node.swarm.protocol.any_message import decode_message, encode_message, tensor_of
from nesa_node.swarm.protocol.attest_messages import Attested, QuotePart
from nesa_node.swarm.protocol.messages import (
    Busy,
    Close,
    Computation,
    Downstream,
    ErrorMessage,
    Link,
    Message,
    Open,
    Output,
    Pages,
    QuantizedPages,
    Received,
    RowSlice,
    Step,
)
from nesa_node.swarm.protocol.seal_messages import (
    MAX_STATEMENT_BYTES,
    Disclose,
    Disclosed,
    Opening,
    OpeningOffer,
    OpeningTaken,
    OpeningWanted,
    Seal,
    SealedRow,
    SealRequest,
    SealStatement,
    open_seal,
    sign_seal,
)
from nesa_node.swarm.protocol.stream import Stream
from nesa_node.topology.links.matrix import MeasuredLink, pack_links, unpack_links
from nesa_node.verification.attestation.check import check_attestation
from nesa_node.verification.attestation.policy import AttestationPolicy
from tests.fuzz.mutation import MSGPACK
from tests.fuzz.swarm_targets import IDENTITY, PEER, fed_pipe, trust
from tests.fuzz.target import Parse, Target
from tests.swarm.seals import make_seal
from tests.swarm.test_openings import opening_of as opened_session
from tests.verification.attestation.made_quotes import nvidia_quote, snp_quote
from tests.verification.attestation.recorded_quotes import NAMES as RECORDED
from tests.verification.attestation.recorded_quotes import SNP_AT, recorded

MAX_TENSOR_BYTES = 64 * 1024
_CODECS = ("none", "bfloat16", "float16", "lossless", "int8", "int8:64:4", "int4", "int4:32:16")


def _messages() -> list[tuple[Message, bytes]]:
    hidden = torch.linspace(-1, 1, 128).view(2, 64)
    meta, payload = tensors.encode(hidden)
    row = (RowSlice(row=0, position=0, count=2),)
    session, secret = bytes(16), bytes(32)
    opening = Open(
        version=(1, 3), model="tiny@0", session=session, secret=secret, blocks=(0, 3), rows=1,
        max_tokens=64, mode="chain", dtype="float32", epoch=1, upstream=None, quality="exact",
        prefix=((bytes(16),),), codecs=("int8",), trace=bytes(24),
    )  # fmt: skip
    plain: list[Message] = [
        opening,
        Busy(retry_after_s=1.0, free_tokens=5, message="full"),
        Link(
            epoch=2, upstream=PEER, downstream=Downstream(PEER, (3, 6)), lengths=(4,),
            emit_from=(0,),
        ),
        Close(prefix=((bytes(16),),)),
        ErrorMessage(code="busy", message="no room"),
        Received(nbytes=5, seconds=0.5),
        AdapterQuery(model="tiny@0", membership=bytes(32), digests=(bytes(32),)),
        AdapterHeld(digests=(bytes(32), bytes(32))),
        AdapterGet(model="tiny@0", digest=bytes(32)),
        AdapterPut(
            model="tiny@0", digest=bytes(32), notice=b"sealed", config_bytes=5, weights_bytes=9
        ),
        AdapterFiles(config_bytes=5, weights_bytes=9),
        AdapterChunk(data=b"data"),
        SealRequest(),
        OpeningOffer(model="tiny@0", accused=PEER, blocks=(0, 3)),
        OpeningWanted(),
        OpeningTaken(),
        _seal(),
        Disclose(rows=row),
    ]  # fmt: skip
    step = Step(session=session, epoch=1, step=3, rows=row, tensor=meta, via=("int8",))
    output = Output(epoch=1, step=3, rows=row, tensor=meta)
    pages = Pages(row=0, position=0, tensor=meta)
    codes = QuantizedPages(row=0, position=0, count=2, nbytes=len(payload))
    disclosed = Disclosed(rows=row, tensor=meta)
    opened = Opening(
        statement=b"statement", signature=bytes(64), secret=secret, inputs=row, outputs=row,
        tensor=meta,
    )  # fmt: skip
    return [(message, b"") for message in plain] + [
        (message, bytes(payload)) for message in (step, output, pages, codes, disclosed, opened)
    ]


def _framed(message: Message, payload: bytes) -> bytes:
    header = encode_message(message)
    prefix = len(header).to_bytes(4, "little") + len(payload).to_bytes(4, "little")
    return prefix + header + payload


def _frame_seeds() -> list[bytes]:
    frames = [_framed(*each) for each in _messages()]
    return [*frames, b"".join(frames)]


@contextmanager
def _streams() -> Iterator[Parse]:
    async def parse(data: bytes) -> None:
        pipe = fed_pipe(data)
        stream = Stream(PeerId(PEER), pipe, pipe)
        while True:
            message, payload = await stream.receive(max_tensor_bytes=MAX_TENSOR_BYTES)
            if (meta := tensor_of(message)) is not None:
                tensors.decode(meta, payload, max_bytes=MAX_TENSOR_BYTES)

    yield parse


@contextmanager
def _decoded_messages() -> Iterator[Parse]:
    yield decode_message


@contextmanager
def _tensors() -> Iterator[Parse]:
    """Two bytes of a description's length, the description, the payload as long as it must be."""
    read = msgspec.msgpack.Decoder(TensorMeta)

    def parse(data: bytes) -> None:
        length = int.from_bytes(data[:2], "little")
        try:
            meta = read.decode(data[2 : 2 + length])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError("no description") from error
        allows_codec("int4", meta.codec)
        codec_name(meta.codec)
        size = tensors.check_meta(meta, max_bytes=MAX_TENSOR_BYTES)
        payload = bytearray(data[2 + length :] or b"\0")
        payload *= -(-size // len(payload))
        tensors.decode(meta, payload[:size], max_bytes=MAX_TENSOR_BYTES)

    yield parse


def _tensor_seeds() -> list[bytes]:
    seeds = []
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        hidden = torch.randn(3, 128, generator=generator).to(dtype)
        for codec in _CODECS:
            with suppress(NesaError):
                meta, payload = tensors.encode(hidden, codec=codec)
                text = msgspec.msgpack.encode(meta)
                seeds.append(len(text).to_bytes(2, "little") + text + bytes(payload))
    return seeds


@contextmanager
def _codec_texts() -> Iterator[Parse]:
    def read(data: bytes) -> None:
        text = data.decode("latin-1")
        allows_codec("int8", text)
        codec_name(text)
        with suppress(NesaError):
            expand_codec(text)
        parse_codec(text)

    yield read


@contextmanager
def _packed_links() -> Iterator[Parse]:
    yield unpack_links


def _link_seeds() -> list[bytes]:
    links = [MeasuredLink(bytes([digest]) * 6, 12.5, 1e7, 60.0) for digest in range(1, 5)]
    return [pack_links(links), pack_links(links[:1])]


@contextmanager
def _training_specs() -> Iterator[Parse]:
    """The spec, and the config that PEFT gets."""

    def read(data: bytes) -> None:
        TrainingSpec.decode(data).make_config()

    yield read


def _spec_seeds() -> list[bytes]:
    optimizer = OptimizerConfig()
    lora = LoraSpec(
        8, 16.0, ("q_proj", "mlp.down_proj"), ("lm_head",), 0.1, True,
        layers_to_transform=(0, 3), rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 2.0},
    )  # fmt: skip
    ia3 = Ia3Spec(("k_proj", "down_proj"), ("down_proj",))
    return [
        TrainingSpec(optimizer, 1).encode(),
        TrainingSpec(optimizer, 1, lora=lora).encode(),
        TrainingSpec(optimizer, 1, lora=LoraSpec(1, 1.0, ("all-linear",))).encode(),
        TrainingSpec(OptimizerConfig("sgd", momentum=0.9), (1 << 63) - 1, ia3=ia3).encode(),
        TrainingSpec(optimizer, 1, bottleneck=BottleneckConfig(8, "gelu")).encode(),
        TrainingSpec(optimizer, 1, deep_prompt=DeepPromptConfig(4)).encode(),
        msgspec.msgpack.encode({"optimizer": msgspec.to_builtins(optimizer), "seed": 1}),
    ]


def _attested_seeds() -> list[bytes]:
    quotes = [recorded(name)[0] for name in RECORDED]
    quotes += [snp_quote(bytes(64)), nvidia_quote(bytes(32))]
    return [
        encode_message(
            Attested(blocks=(0, 3), weights_root=bytes(32), quotes=(QuotePart.of(quote),))
        )
        for quote in quotes
    ]


@contextmanager
def _attested() -> Iterator[Parse]:
    rule = {"measurements": {"any": ["any"]}}
    kinds = {"tdx": rule, "sgx": rule, "snp": rule, "nvidia": rule}
    accept = [{kind: each} for kind, each in kinds.items()]
    policy = AttestationPolicy.model_validate({"accept": accept})

    def parse(data: bytes) -> None:
        message = decode_message(data)
        if isinstance(message, Attested):
            quotes = [part.to_quote() for part in message.quotes]
            check_attestation(quotes, bytes(32), bytes(32), message.weights_root, policy, SNP_AT)
            raise AssertionError("a quote of other hardware, for other nodes, was accepted")

    with warnings.catch_warnings():
        # cryptography warns of certificates that it will refuse in a later version.
        warnings.simplefilter("ignore", CryptographyDeprecationWarning)
        yield parse


def _seal() -> Seal:
    statement = SealStatement(
        version=1, node=PeerId(PEER), session=bytes(16), nonce=bytes(16), epoch=1, number=2,
        blocks=(0, 3), computation=Computation("float32", "none", "cpu"),
        rows=(SealedRow(2, bytes(32), bytes(32)), SealedRow(0, bytes(32), bytes(32))), cuts=1,
    )  # fmt: skip
    return sign_seal(IDENTITY, statement)


@contextmanager
def _seals() -> Iterator[Parse]:
    def read(data: bytes) -> None:
        message = decode_message(data)
        if isinstance(message, Seal):
            open_seal(message, PeerId(PEER))

    yield read


@contextmanager
def _signed_statements() -> Iterator[Parse]:
    """Taken for signed: a node can sign what it likes."""

    def read(data: bytes) -> None:
        with mock.patch("nesa_node.swarm.protocol.seal_messages.verify_signature", new=trust):
            open_seal(Seal(statement=data, signature=bytes(64)), PeerId(PEER))

    yield read


@contextmanager
def _evidence() -> Iterator[Parse]:
    """Two seals of a node, taken for signed: the first one's length comes before them."""

    def read(data: bytes) -> None:
        first = int.from_bytes(data[:2], "big") + 2
        parts = data[2:first], data[first:]
        if all(0 < len(part) <= MAX_STATEMENT_BYTES for part in parts):  # else no notice lists them
            seals = tuple(SignedSeal(statement=part, signature=bytes(64)) for part in parts)
            with mock.patch("nesa_node.swarm.protocol.seal_messages.verify_signature", new=trust):
                check_contradiction(ListedContradiction(accused=PEER, seals=seals))

    yield read


def _evidence_seeds() -> list[bytes]:
    one = make_seal(IDENTITY).statement
    others = (
        make_seal(IDENTITY, root=b"s"),
        make_seal(IDENTITY, number=2, cuts=None),
        make_seal(IDENTITY, number=2, count=3),
        make_seal(IDENTITY, number=2, epoch=0, cuts=0),
    )
    return [len(one).to_bytes(2, "big") + one + other.statement for other in others]


@contextmanager
def _openings() -> Iterator[Parse]:
    """An opening of a seal that is taken for signed, with its values after a frame's sizes."""

    def read(data: bytes) -> None:
        size = int.from_bytes(data[:2], "big") + 2
        opening = decode_message(data[2:size])
        if not isinstance(opening, Opening):
            return
        check_meta(opening.tensor, max_bytes=MAX_TENSOR_BYTES)
        with mock.patch("nesa_node.swarm.protocol.seal_messages.verify_signature", new=trust):
            read_opening(opening, data[size:], PEER, 8)

    yield read


def _opening_seeds() -> list[bytes]:
    seeds = []
    for rows in (1, 3):
        opening, payload = make_opening(*opened_session(IDENTITY, rows=rows))
        header = encode_message(opening)
        seeds.append(len(header).to_bytes(2, "big") + header + payload)
    return seeds


TARGETS: dict[str, Target] = {
    "opening": Target(
        open=_openings,
        seeds=_opening_seeds,
        tokens=(*MSGPACK, b"float16", b"is_exact", b"adapter", b"outputs"),
        weight=0.5,
    ),
    "evidence": Target(
        open=_evidence,
        seeds=_evidence_seeds,
        tokens=(*MSGPACK, PEER.encode(), b"cuts", b"number", b"epoch", b"rows"),
        weight=1.0,
    ),
    "attested": Target(
        open=_attested,
        seeds=_attested_seeds,
        tokens=(*MSGPACK, b"snp", b"nvidia", b"tdx", b"-----BEGIN CERTIFICATE-----\n"),
        weight=0.1,
    ),
    "seal": Target(
        open=_seals, seeds=lambda: [encode_message(_seal())], tokens=MSGPACK, weight=0.5
    ),
    "seal_statement": Target(
        open=_signed_statements,
        seeds=lambda: [_seal().statement],
        tokens=(*MSGPACK, PEER.encode()),
        weight=2.0,
    ),
    "training_spec": Target(
        open=_training_specs,
        seeds=_spec_seeds,
        tokens=(*MSGPACK, b"all-linear", b"lora", b"ia3", b"rank_pattern", b"optimizer"),
        weight=1.0,
    ),
    "stream": Target(open=_streams, seeds=_frame_seeds, tokens=MSGPACK, weight=0.5),
    "message": Target(
        open=_decoded_messages,
        seeds=lambda: [encode_message(message) for message, _ in _messages()],
        tokens=MSGPACK,
        weight=5.0,
    ),
    "tensor": Target(open=_tensors, seeds=_tensor_seeds, tokens=MSGPACK, weight=0.1),
    "codec_text": Target(
        open=_codec_texts,
        seeds=lambda: [b"int8:64:4@2", *(name.encode() for name in FAMILIES)],
        tokens=(b":", b"@", b"0", b"4096", b"99999", b"int4", b"blockwise8", b"\xb2"),
        weight=3.0,
    ),
    "packed_links": Target(
        open=_packed_links,
        seeds=_link_seeds,
        tokens=(b"\xff" * 4, bytes(12)),
        refusals=(ValueError,),
        weight=4.0,
    ),
}
