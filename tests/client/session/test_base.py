"""What nodes are told of a prompt, and where sessions begin with what those say they hold."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from nesa_node.client.session.base import (
    PrefixStart,
    SessionPrefix,
    derive_scope_salt,
    rekey_for_peer,
)
from nesa_node.core.ids import PeerId
from nesa_node.swarm.protocol.messages import (
    MAX_PREFIX_DIGESTS,
    MAX_ROWS,
    VERSION,
    Opened,
    Prefix,
    RowSlice,
)

SALT = b"s" * 32


async def _no_inputs(_: Sequence[RowSlice]) -> torch.Tensor:
    raise AssertionError("nobody needs them")


def announced(
    *rows: Sequence[int], salt: bytes = SALT, model: str = "m@1", dtype: str = "float32"
) -> Prefix:
    return SessionPrefix(salt=salt, tokens=rows, compute_inputs=_no_inputs).prompt_digests(
        model, dtype
    )


def test_a_digest_stands_for_every_token_before_its_end() -> None:
    text = list(range(200))
    (digests,) = announced(text)
    assert len(digests) == 6
    assert len(set(digests)) == 6
    for changed in (0, 31, 32, 100, 191):
        other = list(text)
        other[changed] += 1
        (others,) = announced(other)
        same = [mine == theirs for mine, theirs in zip(digests, others, strict=True)]
        assert same == [page * 32 + 31 < changed for page in range(6)]


def test_digests_differ_with_salt_model_and_precision_but_not_with_the_row() -> None:
    text = list(range(40))
    one, two = announced(text, [*text, 7, 8])
    assert one == two
    others = (
        announced(text, salt=b"t" * 32),
        announced(text, model="m@2"),
        announced(text, dtype="bfloat16"),
    )
    assert len({one, *(row for (row,) in others)}) == 4


def test_scopes_of_one_salt_have_digests_of_their_own() -> None:
    text = list(range(40))
    salts = [derive_scope_salt(SALT, scope) for scope in ("", "alice", "bob", "alice")]
    digests = [announced(text, salt=salt) for salt in salts]
    assert salts[0] == SALT
    assert digests[1] == digests[3]
    assert len(set(digests)) == 3


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 0), (32, 0), (33, 1), (64, 1), (65, 2)])
def test_the_last_token_of_a_prompt_is_always_left_to_compute(tokens: int, pages: int) -> None:
    (digests,) = announced(list(range(tokens)))
    assert len(digests) == pages


def test_what_is_left_behind_ends_where_tokens_are_unknown() -> None:
    prefix = SessionPrefix(salt=SALT, tokens=[()], compute_inputs=_no_inputs)
    assert prefix.final_digests("m@1", "float32") == ()
    text = list(range(128))
    prefix.final_tokens[:] = [text, [*text[:70], -1, *text[71:]]]
    whole, known = prefix.final_digests("m@1", "float32")
    assert len(whole) == 4
    assert known == whole[:2]


def test_no_more_digests_are_sent_than_a_message_holds() -> None:
    for rows in (1, 3, MAX_ROWS):
        prefix = announced(*[list(range(32 * 3000))] * rows)
        assert len(prefix) == rows
        assert MAX_PREFIX_DIGESTS - rows < sum(map(len, prefix)) <= MAX_PREFIX_DIGESTS


def opened(held: Sequence[int]) -> Opened:
    return Opened(
        version=VERSION, max_tokens=999, context_length=999, step_timeout_s=1.0, held=tuple(held)
    )


def test_a_node_is_believed_only_as_far_as_it_was_asked() -> None:
    beginning = PrefixStart(2, ((bytes(16),) * 3, ()))
    assert beginning.held_tokens(opened([64, 0])) == (64, 0)
    assert beginning.held_tokens(opened([999, 999])) == (96, 0)
    for wrong in ((), (64,), (64, 0, 0)):
        assert beginning.held_tokens(opened(wrong)) == (0, 0)
    assert PrefixStart(2).held_tokens(opened([64, 64])) == (0, 0)


def test_a_session_begins_where_every_node_can() -> None:
    beginning = PrefixStart(2)
    assert not beginning.agree_on_start([(96, 32), (64, 64)], None, all_new=True)
    assert beginning.start_lengths == [64, 32]


def test_who_comes_later_and_holds_enough_sends_nobody_back() -> None:
    beginning = PrefixStart(1)
    beginning.agree_on_start([(64,)], None, all_new=True)
    assert not beginning.agree_on_start([(96,)], [200], all_new=False)
    assert not beginning.agree_on_start([], [200], all_new=False)
    assert beginning.start_lengths == [64]


def test_who_comes_later_and_holds_less_sends_all_back_until_a_step_is_done() -> None:
    beginning = PrefixStart(2)
    beginning.agree_on_start([(64, 64)], None, all_new=True)
    assert beginning.agree_on_start([(32, 96)], [200, 200], all_new=False)
    assert beginning.start_lengths == [32, 64]
    assert beginning.agree_on_start([(96, 96)], [200, 200], all_new=False), (
        "some are still on their way"
    )
    assert beginning.agree_on_start([], [200, 200], all_new=False)
    beginning.is_behind = False
    assert not beginning.agree_on_start([(32, 64)], [201, 201], all_new=False)


def test_a_rollback_moves_the_start_and_ends_what_was_announced() -> None:
    beginning = PrefixStart(2, ((bytes(16),) * 4, (bytes(16),) * 2))
    beginning.agree_on_start([(128, 64)], None, all_new=True)
    beginning.truncate([70, 100])
    assert beginning.start_lengths == [70, 64]
    assert [len(digests) for digests in beginning.prefix] == [2, 2]
    beginning.reorder([1, 1])
    assert beginning.start_lengths == [64, 64]


@pytest.mark.parametrize("seed", range(20))
def test_every_sender_has_kept_what_a_newcomer_lacks(seed: int) -> None:
    """Nodes come and go; each is modelled by what it holds and from where on it kept outputs."""
    rng = random.Random(seed)
    beginning, length = PrefixStart(1, ((bytes(16),) * 6,)), 192
    nodes: list[tuple[int, int]] = []
    for turn in range(200):
        survivors = [node for node in nodes if rng.random() < 0.7]
        comers = [rng.choice([0, 32, 64, 192]) for _ in range(4 - len(survivors))]
        reached = [(min(held, length),) for held in comers]
        back = beginning.agree_on_start(reached, [length] if turn else None, all_new=not survivors)
        (start,) = beginning.start_lengths
        assert all(start <= held for (held,) in reached)
        if not back:
            assert all(kept <= start <= held for held, kept in survivors)
        survivors = [(start, start) if back else node for node in survivors]
        nodes = [*survivors, *[(start, start)] * len(comers)]
        if not turn:
            length = start
        if rng.random() < 0.2:
            continue  # the step fails, and everybody is where the replay has got to
        nodes = [(length, kept) for _, kept in nodes]
        beginning.is_behind = False
        if rng.random() < 0.3:
            length = rng.randint(0, length)
            beginning.truncate([length])
            nodes = [(length, min(kept, length)) for _, kept in nodes]
        length += rng.randint(1, 40)
        nodes = [(length, kept) for _, kept in nodes]


def test_two_nodes_are_told_digests_that_have_nothing_in_common() -> None:
    (told,) = announced(list(range(200)))
    one, again, other = (rekey_for_peer((told,), PeerId(peer))[0] for peer in ("a", "a", "b"))
    assert one == again
    assert len({*told, *one, *other}) == 3 * len(told)
