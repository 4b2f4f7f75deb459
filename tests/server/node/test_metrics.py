"""What real daemons tell Prometheus while they serve, compared with what was asked of them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from nesa_node.cli.services.local_swarm import LocalNode
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.core import metrics
from nesa_node.core.ids import Span
from nesa_node.core.metrics import Metric
from nesa_node.engine.weights.checkpoint import compute_model_id
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.server.session import message_loop as refusal_log
from nesa_node.swarm import node as swarm_metrics
from tests.cli.tiny import BLOCKS, VOCABULARY, write_tiny_model
from tests.swarms import Daemons, daemons

ROOT = Path(__file__).parents[3]
HIDDEN_BYTES = 32 * 4
PROMPT = 60
NEW = 6

Values = Mapping[tuple[str, ...], float]


def documented() -> dict[str, tuple[str, str, str, str]]:
    """Of docs/metrics.md: each metric's kind, labels, who tells it, what it is."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+?) \| (.+?) \| (.+) \|$", text, re.MULTILINE)
    return {name: (kind, labels, by, what) for name, kind, labels, by, what in rows}


def told_by(process: str) -> set[str]:
    """Names that it exports always, not only with drafts or masks."""
    told = {name: by.split(", ") for name, (_, _, by, _) in documented().items()}
    return {name for name, by in told.items() if process in by or by == ["all"]}


def scrape(daemons: Daemons, node: LocalNode) -> Values:
    """Values by name and the values of its labels, which the text sorts by name."""
    found = re.search(r"url=(http://\S+?)/", daemons.log(node))
    assert found is not None
    with urlopen(f"{found[1]}/metrics", timeout=10) as response:
        return parsed(response.read().decode())


def parsed(text: str) -> Values:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def exported(values: Values) -> set[str]:
    ends = re.compile(r"_(bucket|count|sum)$")
    histograms = {metric.name for metric in metrics.ALL_METRICS if metric.kind == "histogram"}
    found = {name for name, *_ in values if name.startswith("nesa_")}
    return {ends.sub("", name) if ends.sub("", name) in histograms else name for name in found}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def swarm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    folder = tmp_path_factory.mktemp("swarm")
    with daemons(model, folder, "--metrics", "127.0.0.1:0", "--ping-every-s", "0.2") as running:
        running.start_all([Span(0, 2), Span(2, BLOCKS)])
        yield running


def test_the_documentation_lists_every_metric_as_it_is() -> None:
    rows = documented()
    assert set(rows) == {metric.name for metric in metrics.ALL_METRICS}
    for metric in metrics.ALL_METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        assert (metric.kind, labels, metric.help) == (*rows[metric.name][:2], rows[metric.name][3])
        assert metric.name.endswith("_total") == (metric.kind == "counter")


def test_every_reason_and_code_that_we_refuse_with_is_told() -> None:
    swarm_code = "".join(p.read_text() for p in (ROOT / "nesa_node" / "swarm").rglob("*.py"))
    reasons = set(re.findall(r'RecordError\(\s*"(\w+)"', swarm_code))
    reasons |= set(re.findall(r'dropped\["(\w+)"\]', swarm_code))
    assert reasons <= set(swarm_metrics.DROP_REASONS)
    server_code = "".join(p.read_text() for p in (ROOT / "nesa_node" / "server").rglob("*.py"))
    codes = set(re.findall(r'ProtocolError\(\s*"(\w+)"', server_code))
    assert codes <= set(refusal_log.REFUSAL_CODES)


@pytest.mark.slow
def test_a_node_tells_what_it_computed(model: Path, swarm: Daemons) -> None:
    (first, last), tiny = swarm.nodes, _id(model)
    before = scrape(swarm, first)
    assert exported(before) == told_by("node")
    ids_1L = torch.randint(9, VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(3))
    with AutoDistributedModelForCausalLM.from_pretrained(
        str(model), initial_peers=swarm.addresses, dtype="float32"
    ) as client:
        for _ in range(2):
            with client.inference_session(96, prompt=ids_1L) as session:
                client.generate(
                    ids_1L, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, session=session
                )
                during = scrape(swarm, first)
    deadline = time.monotonic() + 20
    after = scrape(swarm, first)
    while after[("nesa_node_steps_total", tiny)] < 2 * NEW and time.monotonic() < deadline:
        after = scrape(swarm, first)

    def rise(metric: Metric | str, *labels: str) -> float:
        name = metric if isinstance(metric, str) else metric.name
        return after[(name, *labels)] - before[(name, *labels)]

    reused = rise(metrics.PREFIX_HITS, tiny)
    assert reused == 32
    assert rise(metrics.PREFIX_QUERIES, tiny) >= reused
    assert rise(metrics.NODE_STEPS, tiny) == 2 * NEW
    assert rise(metrics.NODE_TOKENS, tiny, "decode") == 2 * (NEW - 1)
    assert rise(metrics.NODE_TOKENS, tiny, "prefill") == 2 * PROMPT - reused
    tokens = 2 * (PROMPT + NEW - 1) - reused
    assert rise(metrics.WIRE_BYTES, "none", "received") == tokens * HIDDEN_BYTES
    assert rise(metrics.WIRE_BYTES, "none", "sent") == tokens * HIDDEN_BYTES
    assert rise("nesa_node_batch_size_sum", tiny) == rise("nesa_node_iteration_seconds_count", tiny)
    assert rise("nesa_node_step_seconds_count", tiny) == 2 * NEW
    assert during[(metrics.REQUESTS_RUNNING.name, tiny, "node")] == 1
    assert during[(metrics.KV_CACHE_USAGE.name, tiny)] > 0
    assert after[(metrics.REQUESTS_RUNNING.name, tiny, "node")] == 0
    assert after[(metrics.NODE_STATE.name, tiny, "serving")] == 1
    assert after[(metrics.SPAN_END.name, tiny)] == 2
    assert scrape(swarm, last)[(metrics.SPAN_END.name, tiny)] == BLOCKS


@pytest.mark.slow
def test_a_node_tells_who_serves_which_block_and_how_far_they_are(
    model: Path, swarm: Daemons
) -> None:
    last, tiny = swarm.nodes[1], _id(model)
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        values = scrape(swarm, last)
        replicas = [
            values[(metrics.BLOCK_REPLICAS.name, str(block), tiny)] for block in range(BLOCKS)
        ]
        pings = values[("nesa_hop_round_trip_seconds_count",)]
        if replicas == [1] * BLOCKS and pings >= 1:
            break
        time.sleep(0.2)
    assert replicas == [1] * BLOCKS
    assert values[(metrics.KNOWN_NODES.name, tiny, "serving")] == 2
    assert pings >= 1


def _id(model: Path) -> str:
    return compute_model_id(open_checkpoint(str(model), cache_dir=model.parent))
