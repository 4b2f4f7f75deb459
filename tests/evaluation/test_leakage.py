"""What a live swarm's nodes receive, and what attacks recover of it: a small model, all modes."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from nesa_node.core.settings.choices import PrivacyName
from nesa_node.evaluation.leakage import LeakageMeasurement, LeakageSetup, cut_windows
from nesa_node.evaluation.leakage_claims import CLAIMS, AttackName
from nesa_node.evaluation.leakage_rows import LeakageRow, Recovered
from tests.privacy.attacks.models import VOCABULARY, random_llama

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[LeakageRow]:
    folder = tmp_path_factory.mktemp("leakage") / "model"
    random_llama().save_pretrained(folder)
    generator = torch.Generator().manual_seed(7)
    # Like those of texts: a few tokens are frequent.
    weights = 1 / torch.arange(1.0, VOCABULARY + 1)
    drawn = torch.multinomial(weights, 24 * 100, replacement=True, generator=generator)
    ids = cut_windows(drawn.tolist(), 24)
    setup = LeakageSetup(
        training_ids=ids[:90],
        secret_ids=ids[90:],
        depths=(1, 2, 3),
        noise_deviations=(0.5, 4.0),
        noise_block=2,
        searched_tokens=8,
        new_tokens=3,
        encrypted_tokens=32,
        known_inputs=64,
    )
    return list(LeakageMeasurement(folder, setup).rows())


def test_every_mode_has_a_claim_an_attack_and_a_row(rows: list[LeakageRow]) -> None:
    assert {*get_args(PrivacyName), "noise", "client-blocks", "sve"} == set(CLAIMS)
    assert {row.mode for row in rows} == set(CLAIMS)
    for claim in CLAIMS.values():
        assert claim.attacks
        done = {each.attack for row in rows if row.mode == claim.mode for each in row.recovered}
        assert done == set(claim.attacks)
    assert {name for claim in CLAIMS.values() for name in claim.attacks} == set(
        get_args(AttackName)
    )


def find(rows: list[LeakageRow], mode: str, attack: str) -> list[Recovered]:
    return [
        each for row in rows if row.mode == mode for each in row.recovered if each.attack == attack
    ]


def test_plain_states_give_the_text(rows: list[LeakageRow]) -> None:
    assert find(rows, "none", "ridge probe")[0].percent > 90
    for attack in ("vocabulary", "Gram matrix", "sorted values"):
        assert [each.percent for each in find(rows, "none", attack)] == [100]


def test_split_learning_is_the_plain_row_of_its_block(rows: list[LeakageRow]) -> None:
    """The star's first node gets what the chain's node of that block gets."""
    [split] = find(rows, "client-blocks", "ridge probe")
    assert split.hits == find(rows, "none", "ridge probe")[1].hits


def test_more_noise_leaves_less(rows: list[LeakageRow]) -> None:
    little, much = (row for row in rows if row.mode == "noise")
    for attack in (0, 1):
        assert little.recovered[attack].hits > much.recovered[attack].hits
    assert little.epsilon_token is not None
    assert much.epsilon_token is not None
    assert little.epsilon_token > much.epsilon_token


def test_the_key_of_folded_weights_is_found(rows: list[LeakageRow]) -> None:
    plain = find(rows, "none", "likelihood probe")[1]
    for attack in ("public weights", "known plaintext"):
        [found] = find(rows, "sve", attack)
        assert found.hits > plain.hits / 2
        assert float(found.detail.removeprefix("key within ")) < 1e-2


def test_tokens_that_an_attack_was_given_are_not_counted(rows: list[LeakageRow]) -> None:
    """Of 240, the template's eight, and the known text's 64."""
    assert [
        find(rows, "sve", attack)[0].tokens for attack in ("public weights", "known plaintext")
    ] == [232, 176]


def test_the_logit_lens_is_compared_with_a_guess_of_next_tokens(rows: list[LeakageRow]) -> None:
    [lens] = find(rows, "none", "logit lens")
    [row] = [row for row in rows if lens in row.recovered]
    assert lens.chance_percent is not None
    # That of a model with random weights, which repeats few tokens, is not that of the text.
    assert 0 < lens.chance_percent <= 100
    assert lens.chance_percent != row.chance_percent


def test_ciphertexts_give_no_more_than_a_guess(rows: list[LeakageRow]) -> None:
    [row] = [row for row in rows if row.mode == "ckks"]
    for each in row.recovered[:2]:
        assert each.interval[0] <= row.chance_percent


def test_sizes_tell_lengths(rows: list[LeakageRow]) -> None:
    for mode in ("none", "client-blocks", "noise", "ckks"):
        assert all(each.percent == 100 for each in find(rows, mode, "traffic"))


def test_intervals_are_those_of_wilson() -> None:
    """Newcombe 1998, table I: 81 of 263, and none of 20."""
    low, high = Recovered("ridge probe", 81, 263).interval
    assert (round(low, 2), round(high, 2)) == (25.53, 36.62)
    low, high = Recovered("ridge probe", 0, 20).interval
    assert (low, round(high, 2)) == (0, 16.11)
