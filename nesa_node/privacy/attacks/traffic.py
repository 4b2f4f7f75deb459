"""What the sizes of messages tell, whatever is in them: how long a prompt and its answer are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionLengths:
    prompt_tokens: int
    new_tokens: int
    """Tokens that were fed back, one less than the answer has."""


def read_lengths(sizes: Sequence[int]) -> SessionLengths:
    """Lengths of a session, of the bytes of the inputs that one layer was sent, in order.

    Each token of an answer is a message of its own: their size is that of one token, and all bytes
    before the first such message are the prompt's. Raises `ValueError` without messages.
    """
    if not sizes:
        raise ValueError("no messages")
    one = min(sizes)
    prompt, rest = sizes[0], list(sizes[1:])
    # A long prompt comes in several messages.
    while rest and rest[0] != one:
        prompt += rest.pop(0)
    return SessionLengths(round(prompt / one), Counter(rest)[one])
