from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks.generation import generate
from benchmarks.models import load_local, model_folder, random_prompt
from benchmarks.options import Options


def test_seed_decides_the_weights_and_nothing_is_left() -> None:
    prompts = []
    folders: list[Path] = []
    for seed in (1, 1, 2):
        options = Options(model="tiny", seed=seed)
        with model_folder(options) as folder:
            folders.append(folder)
            local = load_local(folder, options)
            prompts.append(generate(local, random_prompt(local, 8, 0), 24).tokens)
    assert prompts[0] == prompts[1] != prompts[2]
    assert not any(folder.exists() for folder in folders)


def test_only_the_dtype_asked_for_is_saved() -> None:
    with model_folder(Options(model="tiny", dtype="bfloat16")) as folder:
        with safe_open(folder / "model.safetensors", "pt") as file:
            dtypes = {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
        assert dtypes == {torch.bfloat16}


def test_generation_notes_the_time_of_every_token() -> None:
    options = Options(model="tiny")
    with model_folder(options) as folder:
        local = load_local(folder, options)
        prompt = random_prompt(local, 8, 0)
        whole = generate(local, prompt, 12)
        stopped = generate(local, prompt, 12, stop_when=lambda: True)
    assert len(whole.tokens) == len(whole.token_times) == 12
    assert whole.started < whole.token_times[0] <= whole.token_times[-1] <= whole.ended
    assert len(set(whole.tokens)) > 6, "a model that repeats itself would hide mistakes"
    assert stopped.tokens == whole.tokens[:1]
