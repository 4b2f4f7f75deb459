"""Sessions that were kept, audited again from their files: whole, damaged and edited ones."""

from __future__ import annotations

import base64
import json
import random
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from nesa_node.cli.app import run_command
from nesa_node.client.verification import kept_session
from nesa_node.client.verification.kept_session import KeptSessionError, read_session
from nesa_node.core.errors import WrongActivationsError
from nesa_node.core.settings.choices import RouteName
from tests.client.local_models import random_ids
from tests.e2e.joining import ROUTES, joined
from tests.e2e.liars import calibrate_tiny_models, lie, peer_of, scale
from tests.engine.tiny_models import BLOCKS
from tests.swarms import in_process_swarm, thirds

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def _small_models_are_calibrated(monkeypatch: pytest.MonkeyPatch, logging_given_back: None) -> None:
    calibrate_tiny_models(monkeypatch)


@pytest.fixture(scope="module")
def llama(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


def keep(llama: Path, folder: Path, route: RouteName, rows: int = 1, **options: Any) -> Path:
    """The file of a session of which all nodes are audited."""
    folder.mkdir(exist_ok=True)
    kept = folder / "kept"
    with (
        in_process_swarm(llama, thirds(BLOCKS), folder) as addresses,
        joined(llama, addresses, route, audit=1.0, keep_session=kept, **options) as model,
        suppress(WrongActivationsError),
        model.inference_session(max_length=60, batch_size=rows) as session,
    ):
        model.generate(random_ids(rows, 20), session=session, **OPTIONS)
    (path,) = kept.iterdir()
    return path


@pytest.fixture(scope="module")
def path(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return keep(llama, tmp_path_factory.mktemp("swarm"), "chain")


def verify(
    path: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[dict[str, Any]]]:
    capsys.readouterr()
    code = run_command(["verify", str(path), str(llama), "--json"])
    out = capsys.readouterr()
    assert out.out, out.err
    return code, json.loads(out.out)


@pytest.mark.parametrize("route", ROUTES)
def test_honest_nodes_pass_again(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], route: RouteName
) -> None:
    path = keep(llama, tmp_path, route, rows=3)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    code, found = verify(path, llama, capsys)
    assert code == 0
    assert [record["outcome"] for record in found] == ["passed"] * 3
    assert {record["drawn_with"] for record in found} == {1.0}
    assert sorted(tuple(record["blocks"]) for record in found) == [
        (span.start, span.end) for span in thirds(BLOCKS)
    ]


def test_a_node_that_lied_is_named_again(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lie(monkeypatch, thirds(BLOCKS)[1], scale)
    path = keep(llama, tmp_path, "chain")
    code, found = verify(path, llama, capsys)
    assert code == 1
    by_peer = {record["peer"]: record["outcome"] for record in found}
    assert by_peer[peer_of(tmp_path / "node-1.key")] == "failed"
    assert sorted(by_peer.values()) == ["failed", "passed", "passed"]
    run_command(["verify", str(path), str(llama)])
    assert ": failed" in capsys.readouterr().out


def test_the_words_are_those_of_explain(
    path: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["verify", str(path), str(llama)]) == 0
    told = capsys.readouterr().out
    assert told.count(": passed") == 3
    assert "worst error" in told


def test_no_flipped_bit_is_overlooked(path: Path, tmp_path: Path) -> None:
    whole, damaged = path.read_bytes(), tmp_path / path.name
    rng = random.Random(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    bits = [rng.randrange(8 * header) for _ in range(300)]
    bits += [rng.randrange(8 * len(whole)) for _ in range(300)]
    for bit in bits:
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(data)
        with pytest.raises(KeptSessionError):
            read_session(damaged)
    for length in (0, 7, 100, len(whole) - 1):
        damaged.write_bytes(whole[:length])
        with pytest.raises(KeptSessionError):
            read_session(damaged)


def edit(path: Path, to: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """The file with other contents, and with their digest."""
    tensors, metadata = load(path.read_bytes()), kept_session._read_metadata(path.read_bytes())
    header = json.loads(metadata["header"])
    change(header, tensors)
    text = json.dumps(header)
    metadata |= {"header": text, "digest": kept_session._digest(text, tensors)}
    edited = to / path.name
    edited.write_bytes(save(tensors, metadata))
    return edited


def test_edited_values_are_not_those_that_nodes_sealed(
    path: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def scale_outputs(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["1.0.outputs"] *= 1.05

    def other_inputs(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["1.0.inputs"][3, 0] += 1

    def other_secret(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        header["hops"][1]["secret"] = base64.b64encode(bytes(16)).decode()

    def other_node(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        header["hops"][1]["peer"] = header["hops"][0]["peer"]

    def other_seal(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for key in ("peer", "statement", "signature"):
            header["hops"][1][key] = header["hops"][0][key]

    def other_dtype(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        header["hops"][1]["computation"]["dtype"] = "bfloat16"

    changes = [scale_outputs, other_inputs, other_secret, other_node, other_seal, other_dtype]
    for change in changes:
        code, found = verify(edit(path, tmp_path, change), llama, capsys)
        assert code == 1
        assert found[1]["outcome"] == "not audited"
        assert "edited" in found[1]["reason"]
        assert found[0]["outcome"] == "passed"


def test_what_does_not_fit_together_is_refused(path: Path, tmp_path: Path) -> None:
    def other_version(header: dict[str, Any], tensors: dict[str, Any]) -> None:
        header["version"] = 2

    def no_tensor(header: dict[str, Any], tensors: dict[str, Any]) -> None:
        del tensors["0.0.inputs"]

    def far_position(header: dict[str, Any], tensors: dict[str, Any]) -> None:
        header["hops"][0]["rows"][0]["positions"][0] = 1 << 30

    def many_rows(header: dict[str, Any], tensors: dict[str, Any]) -> None:
        header["hops"][0]["rows"][0]["row"] = 1 << 30

    def flat(header: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["0.0.inputs"] = tensors["0.0.inputs"].flatten()

    def no_hops(header: dict[str, Any], tensors: dict[str, Any]) -> None:
        header["hops"] = []

    for change in (other_version, no_tensor, far_position, many_rows, flat, no_hops):
        with pytest.raises(KeptSessionError):
            read_session(edit(path, tmp_path, change))


def test_hidden_states_of_another_size_are_refused(
    path: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def narrow(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name, values in tensors.items():
            tensors[name] = values[:, :3].contiguous()

    assert run_command(["verify", str(edit(path, tmp_path, narrow)), str(llama)]) == 2
    assert "of another model" in capsys.readouterr().err


def test_another_models_session_is_refused(
    path: Path, tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["verify", str(path), str(tiny("qwen2"))]) == 3
    assert "is of" in capsys.readouterr().err
