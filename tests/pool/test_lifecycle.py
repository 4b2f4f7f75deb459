"""Swarms made of machines without a model: built, used, refused, removed, with real daemons."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

import nesa_node
from nesa_node import AutoDistributedModelForCausalLM
from nesa_node.cli.services.local_swarm import start_process, stop_processes
from nesa_node.core.errors import ConfigError, SwarmError
from tests.browser.browsing import SCREENSHOTS, browsing
from tests.engine.tiny_models import greedy, prompt_ids, reference
from tests.pool.machines import Pool, open_pool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FIRST, SECOND = "tiny-first", "org/tiny-second"
SECOND_FAMILY = "mistral"
MACHINES = 5


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[[str], Path]) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("pool")
    shutil.copytree(tiny("llama"), folder / "cache" / FIRST)
    shutil.copytree(tiny(SECOND_FAMILY), folder / "cache" / SECOND)
    # So little that one machine cannot hold a whole model with its cache: 8 MB of 13.
    share = str(round(8e6 / psutil.virtual_memory().total, 9))
    with open_pool(folder, [("--pool-memory-share", share)] * MACHINES) as pool:
        for model in (FIRST, SECOND):
            built = pool.swarm("create", model)
            assert built.returncode == 0, built.stderr
            assert f"{model}: serving, 1 of 1 replicas on" in built.stdout
        yield pool


def check_tokens(pool: Pool, model: str, folder: Path, count: int = 12) -> None:
    prompt = prompt_ids(9)
    expected = greedy(reference(folder), prompt, count)
    with AutoDistributedModelForCausalLM.from_pretrained(
        pool.cache_dir / model, initial_peers=pool.addresses, dtype=torch.float32
    ) as client:
        found = greedy(client, prompt, count)
    assert found == expected


def test_two_swarms_serve_beside_each_other(pool: Pool, tiny: Callable[[str], Path]) -> None:
    for model, family in ((FIRST, "llama"), (SECOND, SECOND_FAMILY)):
        assert len(pool.held(model, "serving")) > 1, "one machine was to be too small"
        check_tokens(pool, model, tiny(family))
    listed = pool.swarm("list").stdout
    assert FIRST in listed
    assert SECOND in listed


def test_the_page_shows_the_machines_and_the_swarms_made_of_them(pool: Pool) -> None:
    log = pool.folder / "dashboard.log"
    argv = [sys.executable, "-m", "nesa_node", "dashboard", "--listen", "127.0.0.1:0"]
    argv += ["--initial-peers", *pool.addresses]
    process = start_process(argv, log, environment=pool.environment())
    try:
        pool.wait(lambda: "listens on" in log.read_text(), 120, "the page")
        [url] = re.findall(r"listens on (\S+)", log.read_text())
        with browsing(url) as page:
            page.wait_for_selector("#pool:not([hidden])", timeout=60_000)
            page.wait_for_function(
                f"document.querySelectorAll('#machines tr').length === {MACHINES}", timeout=60_000
            )
            rows = page.locator("#built tr").all_inner_texts()
            assert len(rows) == 2
            assert all("serving" in row and "1 of 1" in row for row in rows)
            machines = page.locator("#machines").inner_text()
            assert f"{FIRST} 0:" in machines
            assert "machine-1" in machines
            SCREENSHOTS.mkdir(parents=True, exist_ok=True)
            page.locator("#pool").screenshot(path=SCREENSHOTS / "pool.png")
    finally:
        stop_processes([process])


@pytest.mark.parametrize(
    ("arguments", "user", "words"),
    [
        pytest.param(("create", "/etc/passwd"), "operator", "cannot be asked for", id="a path"),
        pytest.param(("create", "../up"), "operator", "cannot be asked for", id="a path up"),
        pytest.param(("create", FIRST), "stranger", "--allow-creators 12D3Koo", id="a stranger"),
        pytest.param(("scale", "absent", "2"), "operator", "not asked for", id="not asked for"),
        pytest.param(("show", "absent"), "operator", "no such swarm", id="not there"),
        pytest.param(("create", FIRST, "--replicas", "3:1"), "operator", "smaller", id="replicas"),
    ],
)
def test_wrong_wishes_get_one_line(
    pool: Pool, arguments: tuple[str, ...], user: str, words: str
) -> None:
    refused = pool.swarm(*arguments, user=user)
    assert refused.returncode != 0
    assert refused.stdout == ""
    [line] = [line for line in refused.stderr.splitlines() if not line.startswith("[waiting")]
    assert line.startswith("error: ")
    assert words in line


def test_more_replicas_than_fit_are_explained(pool: Pool) -> None:
    assert pool.swarm("scale", FIRST, "9").returncode == 0
    pool.wait(
        lambda: "it does not fit: one more machine with" in pool.swarm("show", FIRST).stdout,
        60,
        "the reason",
    )
    assert pool.swarm("scale", FIRST, "1").returncode == 0


def test_the_same_from_python(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, pool.environment()[name])
    peers = pool.addresses
    assert {each.model for each in nesa_node.list_swarms(initial_peers=peers)} == {FIRST, SECOND}
    nesa_node.scale_swarm(SECOND, 1, 2, initial_peers=peers)
    status = nesa_node.create_swarm(SECOND, wait_s=60, initial_peers=peers)
    assert status is not None
    assert (status.state, status.wanted) == ("serving", 1)
    view = nesa_node.show_swarm(SECOND, initial_peers=peers)
    assert [each.model for each in view.swarms] == [SECOND]
    assert sum(len(held.blocks) for offer in view.offers for held in offer.held) > 0
    with pytest.raises(ConfigError, match=r"model: .*not the name of a model"):
        nesa_node.create_swarm("../up", initial_peers=peers)
    with pytest.raises(ConfigError, match=r"replicas: .*fewer replicas at most"):
        nesa_node.scale_swarm(SECOND, 3, 1, initial_peers=peers)
    with pytest.raises(SwarmError, match="not asked for by this identity"):
        nesa_node.remove_swarm("absent", initial_peers=peers)


def test_a_removed_swarm_gives_its_machines_back(pool: Pool, tiny: Callable[[str], Path]) -> None:
    assert pool.swarm("remove", FIRST).returncode == 0
    states = ("loading", "serving", "leaving")
    pool.wait(lambda: not any(pool.held(FIRST, each) for each in states), 120, "release")
    check_tokens(pool, SECOND, tiny(SECOND_FAMILY))
    again = pool.swarm("remove", FIRST)
    assert again.returncode != 0
    assert f"error: {FIRST}: not asked for by this identity" in again.stderr
