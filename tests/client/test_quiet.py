"""A program that uses the SDK and configured no logging gets its result and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.engine.tiny_models import BLOCKS
from tests.swarms import in_process_swarm, thirds

PROGRAM = """
import sys
import torch
from nesa_node import AutoDistributedModelForCausalLM

with AutoDistributedModelForCausalLM.from_pretrained(
    sys.argv[1], initial_peers=sys.argv[2:]
) as model:
    ids = torch.tensor([[5, 6, 7]])
    result = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0
    )
print(result.shape[1])
"""


def test_the_sdk_prints_nothing_of_its_own(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny("llama")
    with in_process_swarm(folder, thirds(BLOCKS), tmp_path) as addresses:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder), *addresses],
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "6\n", "")
