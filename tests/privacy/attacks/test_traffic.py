from __future__ import annotations

import pytest

from nesa_node.privacy.attacks.traffic import SessionLengths, read_lengths


def test_sizes_of_messages_tell_prompt_and_answer() -> None:
    assert read_lengths([700, 100, 100, 100]) == SessionLengths(7, 3)
    assert read_lengths([800, 800, 300, 100, 100]) == SessionLengths(19, 2)
    assert read_lengths([100, 100]) == SessionLengths(1, 1)
    with pytest.raises(ValueError, match="no messages"):
        read_lengths([])
