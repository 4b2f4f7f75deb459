"""`--private noise:EPS,DELTA,CLIP`: nodes get clipped states with noise, and no digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from structlog.testing import capture_logs
from transformers import PreTrainedModel

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import ConfigError, UnsupportedFeatureError
from nesa_node.core.ids import Span
from nesa_node.core.settings.models import ClientConfig, NodeConfig
from nesa_node.core.settings.sources import load_config
from nesa_node.privacy.noise.gaussian_mechanism import compose_epsilon, find_sigma
from nesa_node.server.session import session as server_session
from nesa_node.server.session.session_state import decode_step
from nesa_node.swarm.protocol.messages import Step
from tests.client.local_models import random_ids
from tests.engine.tiny_models import BLOCKS, reference
from tests.swarms import in_process_swarm

CLIP = 3.0
DELTA = 1e-5
SPANS = [Span(0, 3), Span(3, BLOCKS)]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def llama(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def addresses(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    with in_process_swarm(llama, SPANS, tmp_path_factory.mktemp("swarm")) as joining:
        yield joining


def noisy_model(
    folder: Path, addresses: tuple[str, ...], epsilon: float, *, clip: float = CLIP
) -> DistributedModelForCausalLM:
    return AutoDistributedModelForCausalLM.from_pretrained(
        folder,
        initial_peers=addresses,
        dtype=torch.float32,
        private=f"noise:{epsilon},{DELTA},{clip}",
    )


@pytest.fixture(scope="module")
def alone(llama: Path) -> PreTrainedModel:
    model: PreTrainedModel = reference(llama)
    return model


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Step, torch.Tensor]]:
    """Steps that the nodes were sent, in order, with their hidden states."""
    found: list[tuple[Step, torch.Tensor]] = []

    async def record(step: Step, payload: bytearray) -> Any:
        hidden = await decode_step(step, payload)
        found.append((step, torch.frombuffer(bytearray(payload), dtype=torch.float32)))
        return hidden

    monkeypatch.setattr(server_session, "decode_step", record)
    return found


def test_the_first_node_gets_clipped_states_with_noise_of_that_size(
    llama: Path, addresses: tuple[str, ...], received: list[tuple[Step, torch.Tensor]]
) -> None:
    ids = random_ids(1, 200)
    with noisy_model(llama, addresses, 500.0) as model:
        plain_TD = model.ends.embed([ids[0]], (0,)).float()
        with model.inference_session(max_length=201, prompt=ids) as session:
            session.step(ids)
            assert session.spent_epsilon == pytest.approx(compose_epsilon(500.0, DELTA, 200))
            session.step(ids[:, :1])
            assert session.spent_epsilon == pytest.approx(compose_epsilon(500.0, DELTA, 201))
    # A chunk reaches the first node before it is passed on.
    firsts = {step.rows[0].position: values for step, values in reversed(received)}
    values = torch.cat([firsts[at] for at in sorted(firsts) if at < 200])
    clipped_TD = plain_TD * (CLIP / plain_TD.norm(dim=1, keepdim=True)).clamp_max(1)
    noise_TD = values.view(200, -1) - clipped_TD
    sigma = find_sigma(500.0, DELTA, 2 * CLIP)
    assert float(noise_TD.std()) == pytest.approx(sigma, rel=0.05)
    assert abs(float(noise_TD.mean())) < 0.05 * sigma


def test_what_is_sent_again_counts_again(llama: Path, addresses: tuple[str, ...]) -> None:
    """A conversation's second request sends its first one once more, with fresh noise."""
    ids = random_ids(1, 12)
    with capture_logs() as events, noisy_model(llama, addresses, 500.0) as model:
        for length in (8, 12):
            with model.inference_session(max_length=12, prompt=ids[:, :length]) as session:
                session.step(ids[:, :length])
    told = [event for event in events if event["event"] == "noisy_session_closed"]
    assert [event["tokens"] for event in told] == [8, 12]
    assert [event["connection_tokens"] for event in told] == [8, 20]
    assert [event["connection_epsilon"] for event in told] == [
        pytest.approx(compose_epsilon(500.0, DELTA, vectors), abs=0.01) for vectors in (8, 20)
    ]


def test_little_noise_changes_few_tokens_and_much_changes_most(
    llama: Path, addresses: tuple[str, ...], alone: PreTrainedModel
) -> None:
    ids = random_ids(1, 40)
    with torch.inference_mode():
        expected = alone(ids).logits[0].argmax(-1)
        longest = 1.01 * float(alone.get_input_embeddings()(ids).norm(dim=-1).max())

    def agreement(epsilon: float) -> float:
        with (
            noisy_model(llama, addresses, epsilon, clip=longest) as model,
            model.inference_session(max_length=40) as session,
        ):
            found = session.step(ids)[0].argmax(-1)
        return float((found == expected).float().mean())

    assert agreement(1e6) > 0.8
    assert agreement(1.0) < 0.5


def test_nodes_get_no_digests_of_prefixes(llama: Path, addresses: tuple[str, ...]) -> None:
    ids = random_ids(1, 80)
    with noisy_model(llama, addresses, 500.0) as model:
        for _ in range(2):
            with model.inference_session(max_length=81, prompt=ids) as session:
                assert session.lengths == (0,)
                session.step(ids)


def test_what_noise_cannot_do_is_refused(llama: Path, addresses: tuple[str, ...]) -> None:
    for wrong in ("noise:1,2", "noise:0,1e-5,1", "noise:1,1,1", "noise:1,1e-5,inf", "nois"):
        with pytest.raises(ConfigError, match="noise:"):
            load_config(ClientConfig, {"private": wrong}, {})
        with pytest.raises(ConfigError, match="noise:"):
            AutoDistributedModelForCausalLM.from_pretrained(
                llama, initial_peers=addresses, private=wrong
            )
    with pytest.raises(ConfigError, match="a client's"):
        load_config(NodeConfig, {"model": str(llama), "private": "noise:1,1e-5,1"}, {})
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    with (
        noisy_model(llama, addresses, 1.0) as model,
        pytest.raises(UnsupportedFeatureError, match="leave out private"),
        model.finetuning_session(lora),
    ):
        pass
