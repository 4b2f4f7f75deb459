"""Deployment files, as far as their own tools can judge without an engine or a cluster."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from nesa_node.core.settings.models import (
    GatewayConfig,
    NodeConfig,
    OrchestratorConfig,
    PeerConfig,
    SharedConfig,
)
from nesa_node.core.settings.sources import load_config
from tests.packaging import tools

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "nesa-node"
VALUES = sorted((CHART / "ci").glob("*.yaml"))
UNITS = sorted(DEPLOY.glob("*.service"))
CONFIGS: dict[str, type[SharedConfig]] = {
    "run": NodeConfig,
    "bootstrap": PeerConfig,
    "orchestrate": OrchestratorConfig,
    "api": GatewayConfig,
}
SECRET = "a-phrase-for-tests"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def ran(*command: str | Path, **more: Any) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
        **more,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout + done.stderr)


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    assert ran(tools.hadolint(), "--failure-threshold", "style", DEPLOY / "Dockerfile") == ""


def test_the_image_gets_what_the_wheel_needs_and_nothing_else() -> None:
    """Every line of `.dockerignore` that lets something in names something that is copied."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert {name for line in copied for name in line.split()} == allowed
    assert all((ROOT / name).exists() for name in allowed)


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    """The compose file, as compose reads it."""
    command = [*tools.compose(), "-f", str(DEPLOY / "compose.yaml"), "config"]
    done = subprocess.run(
        command,
        env={**os.environ, "NESA_API_KEY": SECRET},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    services: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return services


def test_compose_reads_a_swarm_a_gateway_and_two_who_watch(composed: dict[str, Any]) -> None:
    nodes = {"node-1", "node-2", "node-3"}
    ours = nodes | {"identity", "bootstrap", "gateway"}
    assert set(composed) == ours | {"prometheus", "grafana"}
    for name in ours:
        assert composed[name]["cap_drop"] == ["ALL"]
        assert composed[name]["read_only"] is True
    for service in composed.values():
        # Nothing is offered to other machines.
        assert all("127.0.0.1" in str(port) for port in service.get("ports", []))


def test_compose_gives_every_container_settings_that_it_takes(composed: dict[str, Any]) -> None:
    for name in ("bootstrap", "node-1", "node-2", "node-3", "gateway"):
        words = " ".join(composed[name]["command"]).split()
        command = words[words.index("nesa-node") + 1] if "nesa-node" in words else words[0]
        load_config(CONFIGS[command], {}, _settings(composed[name]["environment"]))


def test_what_compose_mounts_from_here_exists(composed: dict[str, Any]) -> None:
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    for name in re.findall(r"(\./[\w/-]+):/", text):
        assert (DEPLOY / name).is_dir(), name


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_are_right_and_leave_little_exposed(unit: Path, tmp_path: Path) -> None:
    if not os.access("/usr/bin/systemd-analyze", os.X_OK):
        pytest.skip("systemd-analyze is not installed")
    # It looks for the program, too, which is not there where the tests run.
    copy = tmp_path / unit.name
    text = unit.read_text(encoding="utf-8")
    copy.write_text(text.replace("/opt/nesa-node/bin/nesa-node", "/bin/true"), encoding="utf-8")
    assert ran("systemd-analyze", "verify", copy) == ""
    told = ran("systemd-analyze", "security", "--offline=yes", "--threshold=20", copy)
    assert "Overall exposure level" in told


def test_units_say_how_to_stop_without_killing_the_daemon_first() -> None:
    for unit in UNITS:
        lines = unit.read_text(encoding="utf-8").splitlines()
        assert "KillMode=mixed" in lines
        assert not any(line.startswith("MemoryDenyWriteExecute") for line in lines)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[dict[str, Any]]]:
    """What the chart makes of each file of values."""
    made = {}
    for values in VALUES:
        text = ran(
            tools.helm(),
            "template",
            "swarm",
            CHART,
            "--values",
            values,
            env=_helm_env(tmp_path_factory.mktemp("helm")),
        )
        made[values.stem] = [document for document in yaml.safe_load_all(text) if document]
    return made


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_helm_finds_nothing_in_the_chart(values: Path, tmp_path: Path) -> None:
    told = ran(tools.helm(), "lint", "--strict", CHART, "--values", values, env=_helm_env(tmp_path))
    assert "1 chart(s) linted, 0 chart(s) failed" in told


def test_what_the_chart_makes_is_what_kubernetes_takes(
    rendered: Mapping[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    python = tools.python_with_schemas()
    for name, documents in rendered.items():
        ours = [each for each in documents if "coreos" not in each["apiVersion"]]
        assert len(ours) >= 2
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump_all(ours), encoding="utf-8")
        for version in ("1.27", "1.37"):
            ran(python.with_name("kubernetes-validate"), "--strict", "-k", version, path)


def _pods(documents: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for document in documents:
        if document["kind"] in {"Deployment", "StatefulSet"}:
            yield document["metadata"]["name"], document["spec"]["template"]["spec"]


def test_pods_are_given_settings_that_they_take(
    rendered: Mapping[str, list[dict[str, Any]]],
) -> None:
    for documents in rendered.values():
        for _, pod in _pods(documents):
            (container,) = pod["containers"]
            words = " ".join([*container.get("command", []), *container["args"]]).split()
            command = words[words.index("nesa-node") + 1] if "nesa-node" in words else words[0]
            env = {entry["name"]: entry.get("value", SECRET) for entry in container["env"]}
            load_config(CONFIGS[command], {}, _settings(env))


def test_prometheus_finds_metrics_on_every_pod(
    rendered: Mapping[str, list[dict[str, Any]]],
) -> None:
    """`PodMonitor` looks for a port of that name, and leaves out pods that have none."""
    for documents in rendered.values():
        for name, pod in _pods(documents):
            (container,) = pod["containers"]
            env = {entry["name"]: entry.get("value", SECRET) for entry in container["env"]}
            told = {port["name"]: port["containerPort"] for port in container["ports"]}
            asked = env["NESA_METRICS"].rpartition(":")[2] if "NESA_METRICS" in env else "None"
            assert str(told.get("metrics")) == asked, name


def test_pods_are_neither_root_nor_told_of_services(
    rendered: Mapping[str, list[dict[str, Any]]],
) -> None:
    for documents in rendered.values():
        for name, pod in _pods(documents):
            # Kubernetes' variables would begin with NESA_, and be refused as unknown settings.
            assert pod["enableServiceLinks"] is False, name
            assert pod["securityContext"]["runAsNonRoot"] is True
            for container in (*pod["containers"], *pod.get("initContainers", [])):
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_nodes_are_given_time_to_drain_and_their_own_spans(
    rendered: Mapping[str, list[dict[str, Any]]],
) -> None:
    pods = dict(_pods(rendered["everything-values"]))
    nodes = pods["swarm-nesa-node-nodes"]
    assert nodes["terminationGracePeriodSeconds"] == 120 + 20
    (container,) = nodes["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    script = container["args"][0].replace("exec nesa-node run --block-indices", "echo")
    for number, span in enumerate(["0:12", "12:24", "24:36", "0:12"]):
        env = {**os.environ, "POD_NAME": f"swarm-nesa-node-nodes-{number}"}
        assert ran("sh", "-ec", script, env=env).strip() == span


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("nodes.replica=3", "replica"),
        ("nodes.numBlocks=0", "numBlocks"),
        ("nodes.spans[0]=ten", "spans"),
        ("bootstrap.peerId=12D3", "peerId"),
        ("swarmKey.value=short", "swarmKey"),
        ("nodes.quantType=int4", "quantType"),
    ],
)
def test_helm_refuses_values_that_mean_nothing(wrong: str, words: str, tmp_path: Path) -> None:
    values = CHART / "ci" / "default-values.yaml"
    command: list[str | Path] = [tools.helm(), "template", CHART, "--values", values]
    command += ["--set", wrong]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=_helm_env(tmp_path)
    )
    assert done.returncode != 0
    assert words in done.stderr


def test_a_gateway_without_a_key_is_refused(tmp_path: Path) -> None:
    command: list[str | Path] = [tools.helm(), "template", CHART]
    command += ["--set", "bootstrap.enabled=false"]
    done = subprocess.run(
        [*command, "--set", "initialPeers[0]=/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWa"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=_helm_env(tmp_path),
    )
    assert "gateway.apiKey" in done.stderr


def _settings(environment: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in environment.items() if str(value) != ""}


def _helm_env(folder: Path) -> dict[str, str]:
    """Helm keeps its caches to itself."""
    return {**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
