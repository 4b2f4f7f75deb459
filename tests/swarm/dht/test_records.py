from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nesa_node.core.errors import RecordError
from nesa_node.core.ids import Span
from nesa_node.core.settings.models import MAX_RECORD_TTL_S
from nesa_node.swarm.dht.records import (
    MAX_RECORD_BYTES,
    NodeRecord,
    majority_num_blocks,
)
from nesa_node.swarm.dht.sealing import (
    CLOCK_SKEW_S,
    MAX_ADDRESSES,
    check_age,
    open_statement,
    seal_statement,
)
from nesa_node.swarm.p2p.identity import Identity, Membership
from nesa_node.topology.roofline import BlockWork, Roofline, WeightFigures, pack_roofline
from tests.swarm.record_fields import make_record, make_status

NOW = 1_800_000_000.0
PUBLIC = Membership(None)


ROOFLINE = Roofline(WeightFigures(0.5, 2.0**40, 2.0**45, True), BlockWork(2.0**29, 2.0**30))
"""Of numbers that have few digits in binary."""


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.ephemeral(tmp_path_factory.mktemp("keys"))


def open_record(sealed: bytes, *, now: float, membership: Membership = PUBLIC) -> NodeRecord:
    record = open_statement(NodeRecord, sealed, membership)
    check_age(record, now)
    return record


def _reason(sealed: bytes, *, now: float = NOW, membership: Membership | None = None) -> str:
    with pytest.raises(RecordError) as caught:
        open_record(sealed, now=now, membership=membership or Membership(None))
    return caught.value.reason


def _sign_fields(identity: Identity, fields: dict[str, Any]) -> bytes:
    """What `seal` makes, of fields that `NodeRecord` itself would refuse."""
    body = msgspec.msgpack.encode(fields)
    return msgspec.msgpack.encode(
        {
            "record": body,
            "signature": identity.sign(b"nesa-node record 1\0" + body),
            "peer_id": identity.peer_id,
            "tag": b"",
        }
    )


def _fields(identity: Identity, **changes: Any) -> dict[str, Any]:
    return {"version": 1, **make_record(identity, NOW).model_dump(), **changes}


def test_sealed_record_comes_back_equal(identity: Identity) -> None:
    record = make_record(identity, NOW, public_name="Zoë's GPU", state="joining")
    assert open_record(seal_statement(record, identity), now=NOW) == record


def test_record_becomes_a_node_state(identity: Identity) -> None:
    state = make_record(identity, NOW, load=0.5).node_state()
    assert (state.peer_id, state.span, state.load) == (identity.peer_id, Span(0, 10), 0.5)
    assert state.addresses == (f"/ip4/127.0.0.1/tcp/31330/p2p/{identity.peer_id}",)


@given(data=st.data())
def test_no_changed_byte_passes(data: st.DataObject, identity: Identity) -> None:
    sealed = bytearray(seal_statement(make_record(identity, NOW), identity))
    position = data.draw(st.integers(0, len(sealed) - 1))
    sealed[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordError):
        open_record(bytes(sealed), now=NOW)


@given(st.binary(max_size=300))
def test_no_garbage_passes_or_raises_anything_else(data: bytes) -> None:
    assert _reason(data) in {"malformed", "signature"}


@given(
    st.dictionaries(
        st.sampled_from(sorted(NodeRecord.model_fields)),
        st.none() | st.integers() | st.floats() | st.text() | st.binary() | st.lists(st.integers()),
        min_size=1,
    )
)
def test_signed_nonsense_is_malformed_or_within_bounds(
    identity: Identity, changes: dict[str, Any]
) -> None:
    try:
        sealed = _sign_fields(identity, _fields(identity, **changes))
    except (OverflowError, UnicodeEncodeError):
        return
    try:
        record = open_record(sealed, now=NOW)
    except RecordError as error:
        assert error.reason in {"malformed", "signature", "expired", "future", "oversized"}  # noqa: PT017
        return
    numbers = [value for _, value in record if isinstance(value, int | float)]
    assert all(math.isfinite(value) and 0 <= value < 1e17 for value in numbers)
    assert 0 <= record.span[0] < record.span[1] <= record.num_blocks


@pytest.mark.parametrize(
    "changes",
    [
        {"span": (5, 5)},
        {"span": (0, 31)},
        {"span": (-1, 3)},
        {"num_blocks": 10**9, "span": (0, 1)},
        {"load": math.nan},
        {"decode_tokens_per_s": math.inf},
        {"free_cache_tokens": -1},
        {"free_cache_tokens": "7"},
        {"free_cache_tokens": True},
        {"model_id": "m\n"},
        {"model_id": ""},
        {"public_name": "x" * 65},
        {"public_name": "\x1b[31mred"},
        {"public_name": "a\u202eb"},
        {"dtype": "float 32"},
        {"state": "winning"},
        {"protocol_version": (1,)},
        {"seq": -1},
        {"seq": 2**53},
        {"addresses": ("/ip4/127.0.0.1/tcp/1",)},
        {
            "addresses": (
                "/ip4/1.2.3.4/tcp/1/p2p/12D3KooWQ7gKkLTjkSCHxdSmEUAhYcKzp4hHz6uWPaXkHKR2b9cF",
            )
        },
        {"addresses": 3},
        {"issued_at": NOW, "expires_at": NOW},
        {"issued_at": NOW, "expires_at": NOW + MAX_RECORD_TTL_S + 1},
    ],
)
def test_field_out_of_bounds_is_refused_on_both_sides(
    identity: Identity, changes: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        make_record(identity, NOW, **changes)
    assert _reason(_sign_fields(identity, _fields(identity, **changes))) == "malformed"


@pytest.mark.parametrize("field", NodeRecord.model_fields)
@pytest.mark.parametrize("crowd", [[{}] * 1000, {f"{i:x}": {} for i in range(300)}])
def test_crowded_field_is_refused_before_its_items_are_read(
    identity: Identity, field: str, crowd: object
) -> None:
    sealed = _sign_fields(identity, _fields(identity, **{field: crowd}))
    with pytest.raises(RecordError, match=f"out of bounds: {field}") as caught:
        open_record(sealed, now=NOW)
    cause = caught.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() < 4
    assert "input" not in str(caught.value).replace("Input should", ""), "its text costs too much"


def test_missing_field_is_malformed(identity: Identity) -> None:
    fields = _fields(identity)
    del fields["span"]
    assert _reason(_sign_fields(identity, fields)) == "malformed"


def test_more_addresses_than_allowed_are_refused(identity: Identity) -> None:
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{identity.peer_id}"
    with pytest.raises(ValidationError):
        make_record(identity, NOW, addresses=(address,) * (MAX_ADDRESSES + 1))


def test_field_of_a_later_minor_version_is_ignored(identity: Identity) -> None:
    sealed = _sign_fields(identity, _fields(identity, adapters=["a", "b"]))
    assert open_record(sealed, now=NOW) == make_record(identity, NOW)


def test_other_major_version_is_not_read(identity: Identity) -> None:
    assert _reason(_sign_fields(identity, _fields(identity, version=2))) == "version"


def test_deeply_nested_field_is_malformed(identity: Identity) -> None:
    nested = b"\x91" * 3000 + b"\xc0"
    body = msgspec.msgpack.encode(_fields(identity))
    body = bytes([body[0]]) + bytes([body[1], body[2] + 1]) + body[3:] + b"\xa1x" + nested
    sealed = msgspec.msgpack.encode(
        {
            "record": body,
            "signature": identity.sign(b"nesa-node record 1\0" + body),
            "peer_id": identity.peer_id,
        }
    )
    assert len(sealed) <= MAX_RECORD_BYTES
    assert _reason(sealed) == "malformed"


def test_oversized_record_is_refused_before_it_is_read(identity: Identity) -> None:
    assert _reason(bytes(MAX_RECORD_BYTES + 1)) == "oversized"
    many = tuple(f"/dns/{'x' * 180}{i}/p2p/{identity.peer_id}" for i in range(MAX_ADDRESSES))
    with pytest.raises(RecordError, match="too large"):
        seal_statement(make_record(identity, NOW, addresses=many), identity)


def test_record_signed_by_another_is_refused(identity: Identity, tmp_path: Path) -> None:
    other = Identity.ephemeral(tmp_path)
    with pytest.raises(RecordError, match="cannot sign"):
        seal_statement(make_record(identity, NOW), other)
    assert _reason(_sign_fields(other, _fields(identity))) == "signature"
    envelope = msgspec.msgpack.decode(_sign_fields(other, _fields(identity)))
    envelope["peer_id"] = identity.peer_id
    assert _reason(msgspec.msgpack.encode(envelope)) == "signature"


def test_signature_for_another_purpose_is_refused(identity: Identity) -> None:
    body = msgspec.msgpack.encode(_fields(identity))
    envelope = {"record": body, "signature": identity.sign(body), "peer_id": identity.peer_id}
    assert _reason(msgspec.msgpack.encode(envelope)) == "signature"


def test_record_lives_from_its_issue_to_its_expiry_and_clocks_may_differ(
    identity: Identity,
) -> None:
    sealed = seal_statement(make_record(identity, NOW), identity)
    assert _reason(sealed, now=NOW + 60) == "expired"
    assert open_record(sealed, now=NOW + 59.9).expires_at == NOW + 60
    assert open_record(sealed, now=NOW - CLOCK_SKEW_S).issued_at == NOW
    assert _reason(sealed, now=NOW - CLOCK_SKEW_S - 1) == "future"


def test_private_swarm_reads_its_own_records_only(identity: Identity) -> None:
    ours, theirs = Membership("a long swarm key"), Membership("another swarm key")
    record = make_record(identity, NOW)
    sealed = seal_statement(record, identity, ours)
    assert open_record(sealed, now=NOW, membership=ours) == record
    assert _reason(sealed, membership=theirs) == "foreign"
    assert _reason(sealed) == "foreign"
    assert _reason(seal_statement(record, identity), membership=ours) == "foreign"


@pytest.mark.parametrize(
    ("spans", "num_blocks"),
    [
        ({6: [(0, 3), (3, 6)], 7: [(0, 1), (0, 1)]}, 6),
        ({6: [(0, 3), (3, 6)], 5: [(0, 1), (0, 1)]}, 6),
        ({6: [(0, 3)], 7: [(0, 1)]}, 6),
        ({6: [(0, 6)], 7: [(0, 1), (0, 1)]}, 7),
        ({}, 0),
    ],
)
def test_without_a_checkpoint_most_nodes_say_how_many_blocks_there_are(
    identity: Identity, spans: dict[int, list[tuple[int, int]]], num_blocks: int
) -> None:
    """Where two numbers have as many nodes, the one that leaves no hole; then the smaller."""
    records = [
        make_record(identity, NOW, num_blocks=number, span=span)
        for number, held in spans.items()
        for span in held
    ]
    assert majority_num_blocks(records) == num_blocks
    assert majority_num_blocks(records[::-1]) == num_blocks


def test_status_takes_no_float_for_a_count() -> None:
    with pytest.raises(ValidationError):
        make_status(free_cache_tokens=1.5)


def test_figures_and_memory_of_a_device_reach_the_node_state(identity: Identity) -> None:
    record = make_record(
        identity,
        NOW,
        figures=pack_roofline(ROOFLINE),
        gpu_memory_total_bytes=80,
        gpu_memory_free_bytes=20,
        cpu_memory_total_bytes=7,
        cpu_memory_free_bytes=5,
    )
    sealed = seal_statement(record, identity)
    state = open_record(sealed, now=NOW).node_state()
    assert state.roofline == ROOFLINE
    assert (state.gpu_memory_total_bytes, state.gpu_memory_free_bytes) == (80, 20)
    assert (state.cpu_memory_total_bytes, state.cpu_memory_free_bytes) == (7, 5)
    without = make_record(identity, NOW, figures=b"")
    assert without.node_state().roofline is None


def test_figures_take_21_bytes_of_a_record(identity: Identity) -> None:
    fields = _fields(identity, figures=pack_roofline(ROOFLINE))
    older = {name: value for name, value in fields.items() if name != "figures"}
    assert len(msgspec.msgpack.encode(fields)) - len(msgspec.msgpack.encode(older)) == 21
    assert open_record(_sign_fields(identity, older), now=NOW).figures == b""


@pytest.mark.parametrize("figures", [b"\0", b"\0" * 11, b"\xff" * 11, b"\0" * 500, "text"])
def test_what_are_no_figures_makes_no_record(identity: Identity, figures: object) -> None:
    assert _reason(_sign_fields(identity, _fields(identity, figures=figures))) == "malformed"
