"""What each mode of keeping text from nodes claims, and by which attacks that is measured.

`docs/privacy.md` states these sentences; tests fail for a mode without a claim or an attack, and
where a claim is more than what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

AttackName = Literal[
    "ridge probe",
    "likelihood probe",
    "vocabulary",
    "Gram matrix",
    "sorted values",
    "known plaintext",
    "public weights",
    "logit lens",
    "traffic",
]

_SIZES = "when, of which model, how long prompt and answer are"


@dataclass(frozen=True, slots=True)
class PrivacyClaim:
    """One mode's claim. `hides_tokens`: no attack recovers more tokens than a guess would."""

    mode: str
    statement: str
    hides_tokens: bool
    attacks: tuple[AttackName, ...]
    visible: str
    """What nodes see in any case."""


CLAIMS: dict[str, PrivacyClaim] = {
    claim.mode: claim
    for claim in (
        PrivacyClaim(
            "none",
            "Nothing is kept from nodes: each can recover the text.",
            False,
            (
                "ridge probe",
                "likelihood probe",
                "vocabulary",
                "Gram matrix",
                "sorted values",
                "logit lens",
                "traffic",
            ),
            f"hidden states; {_SIZES}",
        ),
        PrivacyClaim(
            "client-blocks",
            "Split learning keeps embeddings from nodes, not text: most tokens are recovered.",
            False,
            ("ridge probe", "likelihood probe", "traffic"),
            f"hidden states of later blocks; {_SIZES}",
        ),
        PrivacyClaim(
            "noise",
            "Each hidden state is differentially private by itself, with the epsilon stated; where "
            "answers are still useful, most tokens are recovered. A later request sends a "
            "conversation again with fresh noise, which nodes can average: the epsilon of all that "
            "was sent counts, and grows with each.",
            False,
            ("ridge probe", "likelihood probe", "traffic"),
            f"hidden states with noise; {_SIZES}",
        ),
        PrivacyClaim(
            "sve",
            "Secret matrices in weights keep nothing: their key is computed from public weights, "
            "or from known text. It is measured only, and no mode of --private.",
            False,
            ("public weights", "known plaintext"),
            f"hidden states times a secret matrix; {_SIZES}",
        ),
        PrivacyClaim(
            "ckks",
            "Nodes that compute as asked recover no text.",
            True,
            ("ridge probe", "likelihood probe", "traffic"),
            f"ciphertexts; {_SIZES}",
        ),
        PrivacyClaim(
            "masks",
            "Nodes that compute as asked recover no text.",
            True,
            ("ridge probe", "likelihood probe", "traffic"),
            f"uniform random numbers, and encrypted ones; {_SIZES}",
        ),
    )
}
"""By mode: those of `--private`, and the two that have no encryption."""

TOKEN_ATTACKS = frozenset(get_args(AttackName)) - {"traffic"}
"""Attacks whose hits are tokens."""
