from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nesa_node.core.errors import RecordError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.dht.adapter_notices import MAX_LISTED_ADAPTERS, AdapterNotice
from nesa_node.swarm.dht.pool_notices import NOTICE_KINDS
from nesa_node.swarm.dht.records import NodeRecord
from nesa_node.swarm.dht.sealing import (
    MAX_PLACEMENT_MOVES,
    MAX_REPORTED_PEERS,
    AnnouncedMove,
    EvidenceNotice,
    FailureReport,
    Lease,
    Notice,
    PlacementNotice,
    ReportedFailure,
    check_age,
    notice_key,
    open_statement,
    seal_statement,
)
from nesa_node.swarm.dht.training_notices import MAX_LISTED_PLANS, TrainingNotice
from nesa_node.swarm.dht.validator import RecordValidator, dht_id
from nesa_node.swarm.p2p.hivemind_imports import DHTRecord, MSGPackSerializer
from nesa_node.swarm.p2p.identity import Identity, Membership
from tests.swarm.notice_fields import (
    PEERS,
    listed_adapter,
    listed_contradiction,
    make_notice,
    session_plan,
)
from tests.swarm.record_fields import MODEL_ID, make_record

NOW = 1_800_000_000.0
ALL_KINDS = list(NOTICE_KINDS.values())
MODEL = ModelId(MODEL_ID)


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.ephemeral(tmp_path_factory.mktemp("keys"))


def _reason(kind: type[Notice], sealed: bytes, membership: Membership | None = None) -> str:
    with pytest.raises(RecordError) as caught:
        open_statement(kind, sealed, membership or Membership(None))
    return caught.value.reason


def _move(peer: str = PEERS[0], **changes: Any) -> dict[str, Any]:
    return {"peer": peer, "was": (0, 10), "to": (10, 20), "gain": 0.1, **changes}


def _failure(peer: str = PEERS[1], **changes: Any) -> dict[str, Any]:
    return {"peer": peer, "kind": "lost", "count": 1, "at": NOW - 1, **changes}


def _adapter(**changes: Any) -> dict[str, Any]:
    return {**listed_adapter().model_dump(), **changes}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_sealed_notice_comes_back_equal(identity: Identity, kind: type[Notice]) -> None:
    notice = make_notice(kind, identity, NOW)
    assert open_statement(kind, seal_statement(notice, identity)) == notice


def test_largest_placement_and_report_fit(identity: Identity) -> None:
    peers = [
        f"12D3KooW{i:04d}".replace("0", "z") + "A" * 40 for i in range(1, MAX_PLACEMENT_MOVES + 1)
    ]
    assert len(set(peers)) == MAX_PLACEMENT_MOVES
    moves = tuple(
        AnnouncedMove(peer=peer, was=(1000, 9000), to=(2000, 9999), gain=0.123456) for peer in peers
    )
    parameters = {f"parameter_with_a_long_name_{i:02d}": i / 7 for i in range(16)}
    placement = make_notice(
        PlacementNotice,
        identity,
        NOW,
        num_blocks=10_000,
        moves=moves,
        based_on="f" * 64,
        parameters=parameters,
        schema_name="x" * 64,
        reason="r" * 256,
        model_id="m" * 256,
    )
    failures = tuple(
        ReportedFailure(peer=peer, kind="stalled", count=1000, at=NOW - 1)
        for peer in peers[:MAX_REPORTED_PEERS]
    )
    report = make_notice(FailureReport, identity, NOW, failures=failures, model_id="m" * 256)
    membership = Membership("a long swarm key")
    for notice in (placement, report):
        sealed = seal_statement(notice, identity, membership)
        assert open_statement(type(notice), sealed, membership) == notice


def test_sixteen_described_adapters_fit(identity: Identity) -> None:
    adapters = tuple(
        _adapter(name=f"a-rather-long-name-{i:02d}", description="d" * 200)
        for i in range(MAX_LISTED_ADAPTERS)
    )
    notice = make_notice(AdapterNotice, identity, NOW, adapters=adapters, model_id="m" * 256)
    sealed = seal_statement(notice, identity, Membership("a long swarm key"))
    assert open_statement(AdapterNotice, sealed, Membership("a long swarm key")) == notice


def test_eight_plans_fit(identity: Identity) -> None:
    plans = tuple(
        session_plan(session=f"{i:032x}", objective="o" * 64) for i in range(MAX_LISTED_PLANS)
    )
    notice = make_notice(TrainingNotice, identity, NOW, plans=plans, model_id="m" * 256)
    assert isinstance(notice, TrainingNotice)
    assert len({plan.digest for plan in plans}) == MAX_LISTED_PLANS
    sealed = seal_statement(notice, identity, Membership("a long swarm key"))
    opened = open_statement(TrainingNotice, sealed, Membership("a long swarm key"))
    assert [opened.find_plan(plan.digest) for plan in plans] == list(plans)
    assert opened.find_plan(bytes(32)) is None


@pytest.mark.parametrize("kind", ALL_KINDS)
@given(data=st.data())
def test_no_changed_byte_passes(data: st.DataObject, kind: type[Notice]) -> None:
    identity, sealed = _ONCE[kind]
    changed = bytearray(sealed)
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    assert _reason(kind, bytes(changed)) in {"malformed", "signature", "foreign"}
    assert identity.peer_id


@given(st.sampled_from(ALL_KINDS), st.binary(max_size=300))
def test_no_garbage_passes_or_raises_anything_else(kind: type[Notice], data: bytes) -> None:
    assert _reason(kind, data) in {"malformed", "signature"}


def test_signature_of_one_kind_holds_for_no_other(identity: Identity) -> None:
    """Not even where the fields would do."""
    sealed = {
        kind: seal_statement(make_notice(kind, identity, NOW), identity) for kind in ALL_KINDS
    }
    record = seal_statement(make_record(identity, NOW), identity)
    for kind in ALL_KINDS:
        assert _reason(kind, record) == "malformed"
        with pytest.raises(RecordError):
            open_statement(NodeRecord, sealed[kind])
        for other in ALL_KINDS:
            if other is not kind:
                assert _reason(other, sealed[kind]) == "malformed"
                envelope = msgspec.msgpack.decode(sealed[kind])
                envelope["kind"] = other.bounds.name
                assert _reason(other, msgspec.msgpack.encode(envelope)) == "signature"


def test_private_swarm_reads_its_own_notices_only(identity: Identity) -> None:
    ours, theirs = Membership("a long swarm key"), Membership("another swarm key")
    for kind in ALL_KINDS:
        notice = make_notice(kind, identity, NOW)
        sealed = seal_statement(notice, identity, ours)
        assert open_statement(kind, sealed, ours) == notice
        assert _reason(kind, sealed, theirs) == "foreign"
        assert _reason(kind, sealed) == "foreign"
        assert _reason(kind, seal_statement(notice, identity), ours) == "foreign"


def _evidence(end: str = "A") -> dict[str, Any]:
    return {**listed_contradiction().model_dump(), "accused": PEERS[5][:-1] + end}


_SEAL = {"statement": b"x", "signature": bytes(64)}
_BAD_EVIDENCE: list[dict[str, Any]] = [
    *({"seals": (_SEAL,) * count} for count in (0, 1, 3)),
    *({"seals": (_SEAL, {**_SEAL, "statement": text})} for text in (b"", b"x" * 24_577, "x")),
    *({"seals": (_SEAL, {**_SEAL, "signature": bytes(count)})} for count in (0, 63, 65)),
    *({"accused": peer} for peer in ("", "0OIl", "x" * 129)),
]
_PLAN = session_plan().model_dump()
_BAD_PLANS: list[dict[str, Any]] = [
    *({"session": session} for session in ("", "ab" * 15, "AB" * 16)),
    *({"spec": digest} for digest in ("0f" * 31, "../" + "a" * 61)),
    *({"objective": text} for text in ("x" * 65, "\x1b[31mred")),
    *({"replicas": count} for count in (0, 65)),
    *({"zero_stage": stage} for stage in (-1, 4)),
    {"max_tokens": -1},
    {"data": "x" * 65},
]
_BAD_ADAPTERS: list[dict[str, Any]] = [
    *({"name": name} for name in ("", "..", "a/b", "Upper", "x" * 65, "-a", "a\n")),
    *({"digest": digest} for digest in ("0f" * 31, "0F" * 32, "../" + "a" * 61)),
    *({"nbytes": nbytes} for nbytes in (0, -1, 2**28 + 1, 1.5)),
    *({"rank": rank} for rank in (0, 1025)),
    {"target_modules": ()},
    {"target_modules": ("q_proj",) * 33},
    {"target_modules": ("(a+)+$",)},
    {"metrics": {f"m{i}": 1.0 for i in range(9)}},
    {"metrics": {"eval_loss": float("nan")}},
    {"metrics": {"Two Words": 1.0}},
    {"created_at": -1.0},
    {"description": "x" * 201},
    {"description": "\x1b[31mred"},
]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Lease, {"epoch": -1}),
        (Lease, {"epoch": 2**48}),
        (Lease, {"epoch": int(NOW) + 1}),
        (Lease, {"role": "king"}),
        (Lease, {"expires_at": NOW + 121}),
        (Lease, {"expires_at": NOW}),
        (Lease, {"seq": 2**53}),
        (PlacementNotice, {"moves": (_move(to=(10, 31)),)}),
        (PlacementNotice, {"moves": (_move(was=(10, 31)),)}),
        (PlacementNotice, {"moves": (_move(to=(10, 10)),)}),
        (PlacementNotice, {"moves": (_move(to=(20, 10)),)}),
        (PlacementNotice, {"moves": (_move(to=(-1, 10)),)}),
        (PlacementNotice, {"moves": (_move(gain=float("nan")),)}),
        (PlacementNotice, {"moves": (_move(), _move())}),
        (PlacementNotice, {"moves": (_move(peer="\x1b[31m"),)}),
        (
            PlacementNotice,
            {"moves": tuple(_move(f"{PEERS[0]}{i}") for i in range(1, MAX_PLACEMENT_MOVES + 2))},
        ),
        (PlacementNotice, {"gain": float("inf")}),
        (PlacementNotice, {"gain": -2.0}),
        (PlacementNotice, {"reason": "x" * 257}),
        (PlacementNotice, {"reason": "\x1b[31mred"}),
        (PlacementNotice, {"strategy": "Two Words"}),
        (PlacementNotice, {"parameters": {f"p{i}": 1.0 for i in range(17)}}),
        (PlacementNotice, {"based_on": "not hex"}),
        (FailureReport, {"failures": ()}),
        (FailureReport, {"failures": (_failure(at=NOW + 1),)}),
        (FailureReport, {"failures": (_failure(count=0),)}),
        (FailureReport, {"failures": (_failure(kind="ugly"),)}),
        (FailureReport, {"failures": (_failure(), _failure())}),
        (FailureReport, {"failures": tuple(_failure(f"{PEERS[0]}{i}") for i in range(1, 18))}),
        (AdapterNotice, {"expires_at": NOW + 30 * 86_400 + 1}),
        (AdapterNotice, {"adapters": (_adapter(), _adapter())}),
        (AdapterNotice, {"adapters": tuple(_adapter(name=f"n{i}") for i in range(17))}),
        *((AdapterNotice, {"adapters": (_adapter(**changes),)}) for changes in _BAD_ADAPTERS),
        (EvidenceNotice, {"contradictions": ()}),
        (EvidenceNotice, {"contradictions": (_evidence(), _evidence())}),
        (EvidenceNotice, {"contradictions": tuple(map(_evidence, "BCDEF"))}),
        *((EvidenceNotice, {"contradictions": ({**_evidence(), **bad},)}) for bad in _BAD_EVIDENCE),
        (TrainingNotice, {"plans": tuple({**_PLAN, "data": str(i)} for i in range(9))}),
        *((TrainingNotice, {"plans": ({**_PLAN, **changes},)}) for changes in _BAD_PLANS),
    ],
)
def test_field_out_of_bounds_is_refused_on_both_sides(
    identity: Identity, kind: type[Notice], changes: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        make_notice(kind, identity, NOW, **changes)
    assert _reason(kind, _sign_fields(identity, kind, **changes)) in {"malformed", "oversized"}


def _sign_fields(identity: Identity, kind: type[Notice], **changes: Any) -> bytes:
    """What `seal_statement` makes, of fields that `kind` itself would refuse."""
    good = make_notice(kind, identity, NOW).model_dump()
    body = msgspec.msgpack.encode({"version": 1, **good, **changes})
    name = kind.bounds.name
    return msgspec.msgpack.encode(
        {
            "record": body,
            "signature": identity.sign(f"nesa-node {name} 1\0".encode() + body),
            "peer_id": identity.peer_id,
            "kind": name,
        }
    )


_CROWDED = [
    *((kind, {field: [{}] * 600}) for kind in ALL_KINDS for field in kind.model_fields),
    (PlacementNotice, {"moves": [_move(was=[{}] * 1000)]}),
    (PlacementNotice, {"parameters": {f"{i:x}": "x" for i in range(300)}}),
    (
        PlacementNotice,
        {"exponents": {"version": 1, "at": NOW, "why": "x", "values": dict.fromkeys(PEERS, "x")}},
    ),
]


@pytest.mark.parametrize(("kind", "changes"), _CROWDED)
def test_crowded_field_is_refused_before_its_items_are_read(
    identity: Identity, kind: type[Notice], changes: dict[str, Any]
) -> None:
    with pytest.raises(RecordError, match="out of bounds") as caught:
        open_statement(kind, _sign_fields(identity, kind, **changes), Membership(None))
    cause = caught.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() < 4


def test_reporter_that_accuses_itself_is_refused(identity: Identity) -> None:
    with pytest.raises(ValidationError, match="accuses itself"):
        make_notice(FailureReport, identity, NOW, failures=(_failure(identity.peer_id),))


def test_notice_lives_from_its_issue_to_its_expiry(identity: Identity) -> None:
    notice = make_notice(Lease, identity, NOW)
    check_age(notice, NOW + 59.9)
    for now in (NOW + 60, NOW - 31):
        with pytest.raises(RecordError):
            check_age(notice, now)


class _Member:
    """A validator with a clock to turn, and a signer whose notices it sees."""

    def __init__(self, directory: Path) -> None:
        self.now = NOW
        self.validator = RecordValidator(Membership(None), lambda: self.now)
        self.peer = Identity.ephemeral(directory)

    def passes(self, notice: Notice, **changes: Any) -> bool:
        fields: dict[str, Any] = {
            "key": dht_id(notice_key(type(notice), MODEL)),
            "subkey": MSGPackSerializer.dumps(notice.peer_id),
            "value": MSGPackSerializer.dumps(seal_statement(notice, self.peer)),
            "expiration_time": notice.expires_at,
        }
        return self.validator.validate(DHTRecord(**{**fields, **changes}))

    def make(self, kind: type[Notice], **changes: Any) -> Notice:
        return make_notice(kind, self.peer, self.now, **changes)


@pytest.fixture
def member(tmp_path: Path) -> _Member:
    return _Member(tmp_path)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_notice_passes_under_its_own_key_and_subkey_only(
    member: _Member, kind: type[Notice]
) -> None:
    notice = member.make(kind)
    assert member.passes(notice)
    cases = {
        "key": {"key": dht_id(f"nesa/1/model/{MODEL_ID}")},
        "subkey": {"subkey": MSGPackSerializer.dumps(PEERS[0])},
        "expiry": {"expiration_time": notice.expires_at + 1},
        "oversized": {"value": MSGPackSerializer.dumps(bytes(9000))},
    }
    for reason, changes in cases.items():
        assert not member.passes(notice, **changes)
        assert member.validator.dropped[reason] == 1, reason


@pytest.mark.parametrize("kind", [Lease, PlacementNotice])
def test_replaced_notice_does_not_come_back(member: _Member, kind: type[Notice]) -> None:
    old = member.make(kind, epoch=3, seq=9)
    later = member.make(kind, epoch=4, seq=2, expires_at=NOW + 61)
    assert member.passes(old)
    assert member.passes(later)
    assert not member.passes(old)
    assert not member.passes(member.make(kind, epoch=3, seq=10, expires_at=NOW + 62))
    assert member.validator.dropped == {"stale": 2}
    assert member.passes(later)
    newest = member.validator.newest_notice(kind, MODEL, PeerId(old.peer_id))
    assert newest == ((4, 2), NOW + 61)


def test_reports_of_one_signer_are_ten_seconds_apart(member: _Member) -> None:
    assert member.passes(member.make(FailureReport, seq=1))
    member.now += 9
    assert not member.passes(member.make(FailureReport, seq=2))
    assert member.validator.dropped == {"too_soon": 1}
    member.now += 1
    assert member.passes(member.make(FailureReport, seq=3))


def test_flood_of_notices_does_not_push_out_what_is_known_of_records(
    member: _Member, tmp_path: Path
) -> None:
    record = make_record(member.peer, NOW)
    assert member.validator.open(NodeRecord, seal_statement(record, member.peer)) == record
    opened = len(member.validator._memories["record"]._opened)
    for _ in range(300):
        stranger = Identity.ephemeral(tmp_path)
        member.validator.open(Lease, seal_statement(make_notice(Lease, stranger, NOW), stranger))
    assert len(member.validator._memories["record"]._opened) == opened
    assert len(member.validator._memories["lease"]._opened) <= 128


def _sealed_once() -> dict[type[Notice], tuple[Identity, bytes]]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        identity = Identity.ephemeral(Path(folder))
    notices = {kind: make_notice(kind, identity, NOW) for kind in ALL_KINDS}
    return {kind: (identity, seal_statement(notice, identity)) for kind, notice in notices.items()}


_ONCE = _sealed_once()
