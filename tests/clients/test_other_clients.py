"""The npm package `openai`, LangChain, llm and litellm, each in a place of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.clients.environments import SCRIPTS, node_folder, python_of, run_script
from tests.clients.live_gateway import MODEL, LiveGateway
from tests.clients.local_answers import LocalAnswers, Message

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STORY = "Tell me a story about a lighthouse."
MESSAGES: list[Message] = [{"role": "user", "content": STORY}]
NEW_TOKENS = 24
BAD_REQUEST = {"kind": "BadRequestError", "status": 400}
UNAUTHORIZED = {"kind": "AuthenticationError", "status": 401}
REFUSALS: dict[str, dict[str, Any]] = {
    "tools": BAD_REQUEST | {"param": "tools"},
    "surprise": BAD_REQUEST | {"param": "surprise"},
    "suffix": BAD_REQUEST | {"param": "suffix"},
    "previous": BAD_REQUEST | {"param": "previous_response_id"},
    "context": BAD_REQUEST | {"code": "context_length_exceeded"},
    "model": {"kind": "NotFoundError", "status": 404, "code": "model_not_found"},
    "wrong": UNAUTHORIZED,
    "revoked": UNAUTHORIZED,
    "limited": {"kind": "RateLimitError", "status": 429},
}


def _environment(gateway: LiveGateway, folder: Path) -> dict[str, str]:
    return {
        "BASE_URL": gateway.url,
        "API_KEY": gateway.key,
        "REVOKED_KEY": gateway.revoked,
        "LIMITED_KEY": gateway.limited_npm,
        "MODEL": MODEL,
        "HOME": str(folder),
    }


@pytest.fixture(scope="module")
def npm(gateway: LiveGateway, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the npm package got."""
    folder = node_folder()
    # Node looks for packages beside the script.
    script = shutil.copy(SCRIPTS / "openai_npm.mjs", folder)
    home = tmp_path_factory.mktemp("home")
    found: dict[str, Any] = run_script(["node", script], _environment(gateway, home))
    return found


def test_npm_streams_and_answers_what_the_model_says_alone(
    npm: dict[str, Any], local: LocalAnswers
) -> None:
    expected = local.greedy_chat(MESSAGES, NEW_TOKENS)
    assert npm["whole"] == expected
    assert npm["streamed"] == {"words": expected, "usage": npm["usage"]}
    assert npm["helped"] == expected
    assert npm["response"] == expected
    assert MODEL in npm["models"]


def test_npm_gets_log_probabilities_choices_stops_and_seeds(
    npm: dict[str, Any], local: LocalAnswers
) -> None:
    prompt = local.prompt(MESSAGES)
    new = local.greedy(prompt, 4)
    expected_LV = local.log_probabilities([*prompt, *new])[len(prompt) - 1 :]
    expected = [float(expected_LV[at, token]) for at, token in enumerate(new)]
    assert [token["logprob"] for token in npm["logprobs"]] == pytest.approx(expected, abs=2e-3)
    assert [len(token["top_logprobs"]) for token in npm["logprobs"]] == [2] * 4
    assert len(set(npm["three"])) == 3
    assert npm["stopped"] == npm["whole"].partition(npm["stop"])[0]
    first, again, other = npm["drawn"]
    assert first == again != other


def test_npm_gets_json_and_embeddings(npm: dict[str, Any], local: LocalAnswers) -> None:
    jsonschema.validate(json.loads(npm["json"]), npm["schema"])
    expected_D = local.embedding("A lighthouse stands on a rock.").numpy()
    assert np.abs(np.array(npm["floats"]) - expected_D).max() < 1e-4
    assert npm["embedding"] == pytest.approx(npm["floats"], abs=1e-6)


@pytest.mark.parametrize("name", REFUSALS)
def test_npm_turns_refusals_into_its_own_errors(npm: dict[str, Any], name: str) -> None:
    told = npm["refusals"][name]
    assert told is not None
    assert {key: told[key] for key in REFUSALS[name]} == REFUSALS[name]


@pytest.mark.parametrize("client", ["langchain", "litellm"])
def test_python_libraries_answer_and_stream(
    client: str, gateway: LiveGateway, local: LocalAnswers, tmp_path: Path
) -> None:
    command = [python_of(client), SCRIPTS / f"{client}_call.py", STORY]
    told = run_script(command, _environment(gateway, tmp_path))
    expected = local.greedy_chat(MESSAGES, NEW_TOKENS)
    assert (told["answer"], told["streamed"]) == (expected, expected)


def test_llm_answers(gateway: LiveGateway, local: LocalAnswers, tmp_path: Path) -> None:
    """`llm` is a command: its models are in a file of its own folder."""
    model = {"model_id": "swarm", "model_name": MODEL, "api_base": gateway.url}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]), encoding="utf-8")
    env = _environment(gateway, tmp_path) | {
        "LLM_USER_PATH": str(tmp_path),
        "OPENAI_API_KEY": gateway.key,
    }
    options = ["-o", "temperature", "0", "-o", "max_tokens", str(NEW_TOKENS)]
    llm = python_of("llm").with_name("llm")
    told = run_script([llm, "-m", "swarm", *options, STORY], env, as_json=False)
    assert told.strip() == local.greedy_chat(MESSAGES, NEW_TOKENS).strip()
