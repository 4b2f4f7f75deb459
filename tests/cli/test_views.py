"""What `status`, `doctor` and `demo` make of what they find, without a network."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nesa_node.cli.client_model import short_peer_id
from nesa_node.cli.commands.demo import split_demo_blocks
from nesa_node.cli.commands.status import REQUIRED_PACKAGES
from nesa_node.cli.flags import SamplingFlags
from nesa_node.cli.services.doctor_checks import (
    Finding,
    check_clock_skew,
    check_memory_and_disk,
    check_p2pd,
    check_peers,
    check_versions,
    worst_level,
)
from nesa_node.cli.services.local_swarm import LocalNode, NodeWatcher
from nesa_node.cli.swarm_reader import SwarmReading
from nesa_node.cli.views.decisions import print_decisions
from nesa_node.cli.views.swarm import (
    describe_absence,
    format_duration,
    group_by_model,
    models_to_json,
    print_audits,
    print_dropped,
    print_models,
)
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.core.decision_log import LoggedDecision
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import PeerId, Span, split_evenly
from nesa_node.core.known_swarms import KnownSwarmStore
from nesa_node.core.settings.declaration import default_known_swarms_dir
from nesa_node.core.settings.models import ClientConfig
from nesa_node.swarm.dht.records import NodeRecord
from nesa_node.topology.links.matrix import MeasuredLink, pack_links, peer_digest

NOW = 1_800_000_000.0


def record(name: str | None, span: tuple[int, int], **more: Any) -> NodeRecord:
    fields: dict[str, Any] = {
        "state": "serving",
        "model_id": "tiny@0123456789abcdef",
        "model_name": "tiny",
        "num_blocks": 8,
        "span": span,
        "dtype": "float32",
        "protocol_version": (1, 0),
        "public_name": name,
        "peer_id": f"12D3KooW{name or 'nameless'}{span[0]}",
        "seq": 1,
        "issued_at": NOW - 5,
        "expires_at": NOW + 55,
    }
    return NodeRecord(**fields | more)


def shown(records: list[NodeRecord], capsys: pytest.CaptureFixture[str]) -> str:
    print_models(group_by_model(records))
    return capsys.readouterr().out


def test_holes_are_named_and_visible_without_colour(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown([record("a", (0, 3)), record("b", (2, 5))], capsys)
    assert "coverage  0 11211... 8" in text
    assert "holes     5:8: no node serves these blocks" in text


def test_a_node_that_loads_is_shown_and_covers_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown([record("a", (0, 8), state="joining")], capsys)
    assert "joining" in text
    assert "coverage  0 ........ 8" in text


def test_a_deep_model_fits_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown([record("a", (0, 99), num_blocks=100)], capsys)
    line = next(line for line in text.splitlines() if line.startswith("coverage"))
    assert line == f"coverage  0 {'1' * 49}. 100  (minimum of every 2 blocks)"


@pytest.mark.parametrize("name", ["[/bold]", "[link=http://x]y[/link]", ":boom:"])
def test_a_hostile_name_stays_plain_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert name in shown([record(name, (0, 8))], capsys)


def test_no_nodes_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown([], capsys) == "no node was found: the swarm is empty\n"


def test_a_model_without_nodes_is_told_with_what_is_served_the_likest_first() -> None:
    names = ("Big", "Tiny-Instruct", "org/other")
    records = [record("a", (0, 8), model_id=f"{name}@1", model_name=name) for name in names]
    gone = record("b", (0, 8), model_id="tiny@2", state="withdrawn")
    told = describe_absence([*records, gone], "tiny")
    assert told == ("no node serves 'tiny'; the swarm serves Tiny-Instruct@1, Big@1, org/other@1")
    assert (
        describe_absence([gone], "tiny")
        == describe_absence([], None)
        == "no node was found: the swarm is empty"
    )
    many = [record("a", (0, 8), model_id=f"m{n}@1", model_name=f"m{n}") for n in range(9)]
    assert describe_absence(many, "m7").endswith("serves m7@1, m0@1, m1@1, m2@1, m3@1 and 4 more")


def test_a_folder_is_found_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (tmp_path / "Mein Modell ä").symlink_to(folder)
    monkeypatch.chdir(folder)
    for wanted in (".", "../Mein Modell ä/", str(tmp_path / "Mein Modell ä")):
        assert group_by_model([record("a", (0, 8))], wanted), wanted
    assert not group_by_model([record("a", (0, 8))], "..")


@pytest.mark.parametrize("wanted", ["tiny", "/models/tiny", "./tiny/", "tiny@0123456789abcdef"])
def test_a_model_is_found_by_name_folder_and_id(wanted: str) -> None:
    other = record("b", (0, 8), model_id="big@1", model_name="org/big")
    (view,) = group_by_model([record("a", (0, 8)), other], wanted)
    assert view.model_id == "tiny@0123456789abcdef"


def test_a_hub_name_is_matched_whole() -> None:
    records = [record("a", (0, 8), model_name="org/tiny")]
    assert len(group_by_model(records, "org/tiny")) == 1
    assert group_by_model(records, "other/tiny") == []


def test_withdrawn_nodes_are_not_shown() -> None:
    assert group_by_model([record("a", (0, 8), state="withdrawn")]) == []


def test_nodes_that_speak_of_another_number_of_blocks_are_left_out_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    honest = [record("a", (0, 4)), record("b", (4, 8))]
    strangers = [record("c", (0, 1), num_blocks=9), record("d", (0, 1), num_blocks=9)]
    text = shown([*honest, *strangers], capsys)
    assert "8 blocks, 2 nodes" in text
    assert "holes     none" in text
    assert "left out  2 more nodes announce another number of blocks than 8" in text


def test_json_tells_coverage_and_holes() -> None:
    (told,) = models_to_json(group_by_model([record("a", (0, 3))]))
    assert told["coverage"] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert told["holes"] == [[3, 8]]


def test_dropped_records_are_counted_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    print_dropped({"signature": 2, "expired": 0})
    assert capsys.readouterr().out.startswith("dropped   2 signature")
    print_dropped({})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(3, "3 s"), (119, "119 s"), (150, "2 min"), (8000, "2 h"), (9e5, "10 d")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_doctor_checks_the_way_to_a_node_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    known = KnownSwarmStore(default_known_swarms_dir())
    known.save_last(["192.0.2.7:1"], "tiny@1")
    (alone,) = check_peers(ClientConfig())
    assert alone.detail.startswith("none given; name some with --initial-peers")
    with known.register_node(["127.0.0.1:1"], "tiny@1", "attic"):
        told, failed = check_peers(ClientConfig())
    assert told.detail == "none given; using the node attic of tiny@1 on this machine"
    assert "127.0.0.1:1" in failed.detail
    assert "its address and port, and firewalls" in failed.advice


def clock(reading: SwarmReading) -> list[tuple[str, str]]:
    return [(finding.subject, finding.level) for finding in check_clock_skew(reading, NOW)]


def test_clocks_that_agree_are_fine() -> None:
    reading = SwarmReading((record("a", (0, 8)),), {})
    assert clock(reading) == [("swarm", "ok"), ("clock", "ok")]


def test_a_clock_behind_the_swarm_is_told() -> None:
    ahead = record("a", (0, 8), issued_at=NOW + 25, expires_at=NOW + 85)
    assert clock(SwarmReading((ahead,), {})) == [("swarm", "ok"), ("clock", "warn")]
    assert clock(SwarmReading((), {"future": 3})) == [("clock", "fail")]


def test_a_clock_ahead_of_the_swarm_is_told() -> None:
    assert clock(SwarmReading((), {"expired": 3})) == [("clock", "fail")]


def test_an_empty_swarm_is_a_warning() -> None:
    assert clock(SwarmReading((), {})) == [("swarm", "warn")]


def test_p2pd_must_be_there_and_executable(tmp_path: Path) -> None:
    path = tmp_path / "p2pd"
    assert [finding.level for finding in check_p2pd(path)] == ["fail"]
    path.touch(mode=0o644)
    if not path.stat().st_mode & 0o111:
        assert [finding.level for finding in check_p2pd(path)] == ["fail"]
    path.chmod(0o755)
    assert [finding.level for finding in check_p2pd(path)] == ["ok"]


def test_versions_are_found() -> None:
    assert worst_level(list(check_versions(REQUIRED_PACKAGES))) == "ok"


@pytest.mark.parametrize("package", REQUIRED_PACKAGES)
def test_doctor_tells_which_package_is_missing(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; "
        "from nesa_node.cli.app import run_command; sys.exit(run_command(['doctor']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert ran.returncode == 2
    assert ran.stderr == f"error: not installed: {package}; reinstall nesa-node with pip\n"


def test_a_cache_folder_that_does_not_exist_yet_is_fine(tmp_path: Path) -> None:
    findings = list(check_memory_and_disk(tmp_path / "not" / "yet"))
    assert [finding.subject for finding in findings] == ["memory", "disk"]
    assert findings[1].level != "fail"


def test_the_worst_finding_decides() -> None:
    findings = [Finding("ok", "a", ""), Finding("fail", "b", ""), Finding("warn", "c", "")]
    assert worst_level(findings) == "fail"
    assert worst_level(findings[::2]) == "warn"


@pytest.mark.parametrize(("blocks", "parts"), [(30, 3), (4, 3), (2, 3), (1, 1), (7, 2)])
def test_an_even_split_covers_every_block_once(blocks: int, parts: int) -> None:
    spans = split_evenly(blocks, parts)
    assert [index for span in spans for index in range(span.start, span.end)] == list(range(blocks))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1
    assert all(len(span) for span in spans)


@pytest.mark.parametrize("flags", [SamplingFlags(temperature=0), SamplingFlags(top_p=1.5)])
def test_sampling_values_out_of_range_are_refused(flags: SamplingFlags) -> None:
    with pytest.raises(ConfigError):
        flags.check()


def test_json_has_measured_links_in_numbers() -> None:
    one, two = record("a", (0, 4)), record("b", (4, 8))
    links = [
        MeasuredLink(peer_digest(PeerId(two.peer_id)), 1.5, 2e6, 60.0),
        MeasuredLink(b"\xff\xc8\x00\x01\x02\x03", 40.0, math.nan, 0.0),
    ]
    seen = group_by_model([record("a", (0, 4), measured=pack_links(links)), two])
    (model,) = json.loads(json.dumps(models_to_json(seen)))
    assert one.peer_id == model["nodes"][0]["peer_id"]
    assert model["nodes"][0]["measured"] == [
        {
            "peer_id": two.peer_id,
            "peer_digest": peer_digest(PeerId(two.peer_id)).hex(),
            "rtt_ms": 1.5,
            "rate_bytes_per_s": 2_000_000,
            "age_s": 60.0,
        },
        {
            "peer_id": None,
            "peer_digest": "ffc800010203",
            "rtt_ms": 40.0,
            "rate_bytes_per_s": None,
            "age_s": 0.0,
        },
    ]


def test_decisions_begin_with_the_newest_and_repeats_are_one_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def kept(name: str, reason: str) -> LoggedDecision:
        return LoggedDecision("placement", name, NOW, {"reason": reason})

    print_decisions([kept("third", "same"), kept("second", "same"), kept("first", "other")], rows=5)
    rows = [line for line in capsys.readouterr().out.splitlines() if "placement" in line]
    assert len(rows) == 2
    assert "third" in rows[0]
    assert "same (2 times)" in rows[0]
    assert "first" in rows[1]
    print_decisions([kept("third", "same"), kept("first", "other")], rows=1)
    assert "first" not in capsys.readouterr().out


def test_the_fourth_node_of_a_demo_holds_what_the_second_does() -> None:
    assert split_demo_blocks(30, 4) == (Span(0, 10), Span(10, 20), Span(20, 30), Span(10, 20))
    assert split_demo_blocks(30, 3) == (Span(0, 10), Span(10, 20), Span(20, 30))
    assert split_demo_blocks(30, 1) == (Span(0, 30),)


def sleeping(name: str, span: Span, folder: Path) -> LocalNode:
    code = "import time; time.sleep(60)"
    ready = folder / f"{name}.json"
    ready.write_text("{}", encoding="utf-8")
    return LocalNode(
        name=name,
        process=subprocess.Popen([sys.executable, "-c", code]),
        log_path=folder / name,
        ready_file=ready,
        peer_id=name,
        addresses=(f"/ip4/127.0.0.1/tcp/1/p2p/{name}",),
        span=span,
        startup_s=1.0,
        command=("python", "-m", "nesa_node", "run", "a model", "--public-name", name),
    )


def test_a_demo_says_which_node_died_and_how_to_start_it_again(tmp_path: Path) -> None:
    spans = (Span(0, 4), Span(4, 8), Span(4, 8))
    nodes = [sleeping(f"n{at}", span, tmp_path) for at, span in enumerate(spans)]
    supervisor = NodeWatcher(nodes, ("--threads", "1"))
    try:
        assert list(supervisor.poll()) == []
        nodes[1].process.kill()
        nodes[1].process.wait()
        (said,) = supervisor.poll()
        assert "n1 has ended (SIGKILL); it held blocks 4:8: n2 goes on with them" in said
        assert shlex.split(said.splitlines()[-1]) == [
            *nodes[1].command,
            *("--threads", "1", "--initial-peers", *nodes[0].addresses, *nodes[2].addresses),
        ]
        assert list(supervisor.poll()) == []
        nodes[1].ready_file.write_text("{}", encoding="utf-8")
        assert list(supervisor.poll()) == ["  n1 serves again"]
        nodes[0].process.kill()
        nodes[0].process.wait()
        (said,) = supervisor.poll()
        assert "no other node holds them" in said
    finally:
        for node in nodes:
            node.process.kill()
            node.process.wait()


def test_what_audits_said_of_nodes_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    models = group_by_model([record("a", (0, 3)), record("b", (3, 8)), record("c", (0, 8))])
    good, bad, unknown = (PeerId(each.peer_id) for each in models[0].records)
    history = AuditHistory(None)
    for _ in range(2):
        history.record_passed(good)
    history.bar(bad, "wrong activations of blocks 3:8: its errors are 4 x those allowed")
    print_audits(models, history)
    passed, barred = capsys.readouterr().out.splitlines()
    assert passed == f"audits    passed: {short_peer_id(good)} 2"
    assert barred.startswith(f"barred    {short_peer_id(bad)}: wrong activations of blocks 3:8")
    (told,) = models_to_json(models, history)
    nodes = {node["peer_id"]: node for node in told["nodes"]}  # type: ignore[attr-defined]
    assert nodes[good]["audits_passed"] == 2
    assert "4 x" in nodes[bad]["barred_for"]
    assert (nodes[unknown]["audits_passed"], nodes[unknown]["barred_for"]) == (0, "")
