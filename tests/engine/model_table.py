"""Writer of docs/models.md: `python -m tests.engine.model_table > docs/models.md`.

What is served is decided as a node does it, by a small model of each causal type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn

from nesa_node.core.errors import UnsupportedModelError
from nesa_node.engine.kernels.quantized_experts import find_stack
from nesa_node.engine.weights.families import FAMILIES, require_servable
from nesa_node.engine.weights.language_models import find_family
from nesa_node.engine.weights.model_tree import make_empty_model
from tests.engine.model_types import CAUSAL_TYPES, tiny_config

_HEAD = """\
# Models that can be served

Made by `python -m tests.engine.model_table > docs/models.md`. Do not edit it.

A language model is served in blocks if it is a stack of decoder layers between embedding and
head. Thirteen families have a row in `FAMILIES` (`nesa_node/engine/weights/families.py`), since
machine code, or something that no module tree says, was written for them. What else transformers
knows is read from its module tree (`nesa_node/engine/weights/model_tree.py`). These are all
{total} types that `AutoModelForCausalLM` of transformers {version} knows: {served} are served,
{refused} are refused.

**Served** means tested: `tests/e2e/test_model_types.py` cuts a small random model of each type in
three, serves it by three daemons, and compares with transformers the greedy tokens after a prompt
longer than its window or chunk, and those of a left-padded batch, by the criterion of
CONTRIBUTING.md. Checkpoints of a type differ: what is refused below in one type can occur in
another by its config (`layer_types` of a hybrid, say), and is refused then, with the same reason.

*together*: rows of several sessions are computed in one pass, with attention over pages. *one by
one*: layers do something with keys and values that pages cannot stand in for (latents, sinks,
chunks), so that each row is a pass of its own. *cache*: numbers per token and block, of the small
model. *experts*: whether --quant-type holds a mixture's stacked experts in fewer bits, too, or
leaves them in 16, since their layout is not known (`find_stack` in
`nesa_node/engine/kernels/quantized_experts.py`).

A model that is refused here may still be run in pieces of its graph (`docs/graphs.md`).
"""


@dataclass(frozen=True)
class TypeRow:
    """One causal type: how it is served, or why it is not."""

    name: str
    how: str
    reason: str | None = None

    def __str__(self) -> str:
        return f"| `{self.name}` | {self.how if self.reason is None else self.reason} |"


def describe(model_type: str) -> TypeRow:
    """How a small model of this type is served, or why it is not."""
    try:
        config = tiny_config(model_type)
        require_servable(config, name=model_type)
        family = find_family(config)
    except UnsupportedModelError as error:
        # What can be served, and the type's own name, are in every such message.
        reason = str(error).split(". These families can")[0]
        _, _, told = reason.partition("which cannot be served: ")
        own = f"{model_type} models cannot be served: "
        return TypeRow(model_type, "", reason=_escape(told or reason.removeprefix(own)))
    except Exception as error:
        # transformers validates configs with exceptions of many types.
        reason = f"transformers makes no small model of it: {error}"
        return TypeRow(model_type, "", reason=_escape(reason))
    passes = "together" if family.packs_rows else "one by one"
    sizes = {
        "+".join(f"{heads}x{dim}" for heads, dim in shape.shapes)
        for shape in family.list_cache_heads(config)
    }
    origin = f"table: {family.title}" if config.model_type in FAMILIES else "module tree"
    experts = describe_experts(config)
    return TypeRow(model_type, f"{origin} | {passes} | {', '.join(sorted(sizes))} | {experts}")


def describe_experts(config: Any) -> str:
    """How the stacked experts of a config's model are held with a quantization; "" for none."""
    found = set()
    for path, module in make_empty_model(config).named_modules():
        for name, value in module.named_parameters(recurse=False):
            is_stacked = value.ndim == 3 or (value.ndim == 2 and ".experts." in f"{path}.")
            if is_stacked and not isinstance(module, nn.Linear) and not name.endswith("_bias"):
                known = find_stack(module, name) is not None
                found.add("fewer bits" if known else "16 bits")
    return " and ".join(sorted(found))


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")[:160]


def served_types() -> list[str]:
    """Causal types of which a small model is served."""
    return [name for name in CAUSAL_TYPES if describe(name).reason is None]


def write_table() -> Iterator[str]:
    """Lines of docs/models.md. Takes a minute."""
    rows = [describe(name) for name in CAUSAL_TYPES]
    served = [row for row in rows if row.reason is None]
    refused = [row for row in rows if row.reason is not None]
    yield _HEAD.format(
        total=len(rows),
        version=transformers.__version__,
        served=len(served),
        refused=len(refused),
    )
    yield "## Served\n\n| type | read from | rows | cache | experts |\n|-|-|-|-|-|"
    yield from map(str, served)
    yield "\n## Refused\n\n| type | why |\n|-|-|"
    yield from map(str, refused)


if __name__ == "__main__":
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    for line in write_table():
        print(line)
