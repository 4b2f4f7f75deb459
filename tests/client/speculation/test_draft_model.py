"""A draft model in the client: its tokens are its greedy ones; others than fitting are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from nesa_node.client.model import auto
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM, build_local_model
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.speculation.draft_model import ModelDrafter, open_drafting
from nesa_node.client.speculation.drafting import Drafting
from nesa_node.core.errors import ConfigError, ModelNotFoundError
from nesa_node.core.settings.models import ClientConfig
from nesa_node.engine.weights.hub import open_checkpoint
from tests.client.local_models import local_model
from tests.engine.tiny_models import greedy, prompt_ids, reference


def drafting_of(folder: Path, draft: str, **options: Any) -> Drafting | None:
    opened = partial(open_checkpoint, cache_dir=folder)
    return open_drafting(draft, opened(str(folder)), opened, build_local_model, **options)


def test_it_drafts_its_greedy_tokens_also_after_others_were_taken(
    tiny: Callable[[str], Path],
) -> None:
    alone, text = reference(tiny("llama")), prompt_ids(20)
    with local_model(tiny("llama"), client_blocks=(6, 0)) as model:
        drafter = ModelDrafter(model)
        for more in (text, [3], greedy(alone, [*text, 3], 4)[:2], [9, 9]):
            drafter.append(more)
            text = text if more is text else [*text, *more]
            drafted = list(islice(drafter.draft(), 5))
            assert [token for token, _ in drafted] == greedy(alone, text, 5)
            assert all(kind.source == "model" and 0 <= kind.level < 8 for _, kind in drafted)
        drafter.close()


def test_nothing_is_drafted_beyond_the_context_of_the_draft_model(
    tiny: Callable[[str], Path],
) -> None:
    with local_model(tiny("llama"), client_blocks=(6, 0)) as model:
        drafter = ModelDrafter(model)
        drafter.append(prompt_ids(model.context_length - 3))
        assert len(list(drafter.draft())) == 4
        drafter.append(prompt_ids(5))
        assert list(drafter.draft()) == []
        drafter.close()


def test_settings_choose_what_drafts(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    assert drafting_of(tiny("llama"), "off") is None
    for draft in ("lookup", "auto"):
        drafting = drafting_of(tiny("llama"), draft)
        assert drafting is not None
        with drafting.speculate(b"", [[1, 2, 1, 2]]):
            pass
        drafting.close()
    drafting = drafting_of(tiny("llama"), str(tiny("llama")))
    assert drafting is not None
    drafting.close()


def test_a_model_with_another_vocabulary_is_refused(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny("llama").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 321}))
    with pytest.raises(ConfigError, match="its vocabulary has 321 tokens, not 320"):
        drafting_of(tiny("llama"), str(other))
    (other / "config.json").write_text(json.dumps(config))
    for folder, vocabulary in ((tiny("llama"), {"a": 0}), (other, {"a": 1})):
        told = json.dumps({"model": {"vocab": vocabulary}})
        copy = tmp_path / folder.name
        copy.mkdir(exist_ok=True)
        for file in folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        (copy / "tokenizer.json").write_text(told)
    with pytest.raises(ConfigError, match="its tokenizer numbers tokens otherwise"):
        drafting_of(tmp_path / tiny("llama").name, str(other))


def test_what_is_no_model_is_refused_by_its_name(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"draft=/nowhere \(or lookup, auto, off\): /nowhere"
    ):
        drafting_of(tiny("llama"), "/nowhere")


@pytest.mark.parametrize("private", ["ckks", "masks", "noise:200,1e-5,30"])
def test_private_sessions_draft_nothing(tiny: Callable[[str], Path], private: str) -> None:
    assert drafting_of(tiny("llama"), "auto", private=private) is None
    with pytest.raises(ConfigError, match=f"draft=lookup with private={private}"):
        AutoDistributedModelForCausalLM.from_pretrained(
            tiny("llama"), private=private, draft="lookup"
        )


def test_a_draft_model_is_closed_with_a_model_that_is_refused(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[DistributedModelForCausalLM] = []
    monkeypatch.setattr(DistributedModelForCausalLM, "close", lambda self: closed.append(self))
    with pytest.raises(ConfigError, match="--client-quant-type int5"):
        AutoDistributedModelForCausalLM.from_pretrained(
            tiny("llama"),
            draft=str(tiny("llama")),
            client_quant_type="int5",  # type: ignore[arg-type]  # what is refused
        )
    assert len(closed) == 1


def test_a_model_that_drafts_for_itself_keeps_its_revision(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def opened(name: str, **options: Any) -> None:
        asked.append((name, options["revision"]))

    monkeypatch.setattr(auto, "open_checkpoint", opened)
    name = str(tiny("llama"))
    auto.open_named_checkpoint(ClientConfig(draft=name, revision="main"), name)
    assert asked == [(name, "main")]
