"""Continue's command, with the configuration that `docs/clients.md` shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.environments import ROOT, node_folder, run_script
from tests.clients.live_gateway import LiveGateway

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _recipe(gateway: LiveGateway) -> str:
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    recipe = page.partition("## Continue\n")[2].partition("```yaml\n")[2].partition("```")[0]
    for shown, ours in (("http://127.0.0.1:8000/v1", gateway.url), ("nesa-...", gateway.key)):
        assert recipe.count(shown) == 1
        recipe = recipe.replace(shown, ours)
    return recipe + "      maxTokens: 8\n"


def _ask(gateway: LiveGateway, home: Path, *options: str) -> str:
    (home / ".continue").mkdir()
    (home / ".continue" / "config.yaml").write_text(_recipe(gateway), encoding="utf-8")
    cn = node_folder() / "node_modules" / ".bin" / "cn"
    command: list[str | Path] = [cn, "-p", "Name a colour.", *options]
    env = {"HOME": str(home), "CONTINUE_CLI_ENABLE_TELEMETRY": "0"}
    said: str = run_script(command, env, as_json=False)
    return said


def test_continue_answers_without_its_tools(gateway: LiveGateway, tmp_path: Path) -> None:
    assert _ask(gateway, tmp_path, "--exclude", "*").strip()


def test_continue_shows_why_a_model_takes_no_tools(gateway: LiveGateway, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="chat template knows no tools"):
        _ask(gateway, tmp_path)
