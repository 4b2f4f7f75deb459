"""A node that changes its blocks while sessions run: none fails, and no token differs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from nesa_node.core.errors import InsufficientMemoryError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import RouteName
from nesa_node.engine.model.loading import load_blocks
from tests.client.local_models import random_ids
from tests.faults.bed import Bed
from tests.faults.movers import Mover, open_mover
from tests.faults.runs import Blow, assert_undisturbed, generate, join_bed, run_with_blow
from tests.faults.test_leaving import peers_in_directory

LOW, HIGH = Span(0, 3), Span(3, 6)


class _Moving:
    """Asks for a move and goes on: the generation is not to wait for it."""

    def __init__(self, mover: Mover, span: Span) -> None:
        self.answer = "none"
        self._mover, self._span = mover, span
        self._thread = threading.Thread(target=self._ask)

    def __call__(self) -> None:
        self._thread.start()

    def _ask(self) -> None:
        self.answer = self._mover.ask(self._span)

    def finish(self) -> str:
        self._thread.join()
        return self.answer


@pytest.mark.parametrize("routing", ["chain", pytest.param("star", marks=pytest.mark.slow)])
def test_session_goes_on_while_its_node_moves_there_and_back(
    alone: PreTrainedModel, bed: Bed, tmp_path: Path, routing: RouteName
) -> None:
    bed.start([HIGH])
    ids_BL = random_ids(1, 20)
    with (
        open_mover(bed, LOW, tmp_path) as mover,
        join_bed(bed, routing) as model,
        model.inference_session(256) as session,
    ):
        there = _Moving(mover, HIGH)
        prompt_BL = generate(model, ids_BL, session, new_tokens=4)
        assert session.hops[0].peer_id == mover.peer_id
        [stays] = bed.start([LOW])
        blow = Blow(after=5, strike=there, pause_s=0.05)
        name = f"node moves, {routing}"
        output_BL = run_with_blow(alone, model, session, prompt_BL, blow, name)
        assert there.finish() == "moved"
        assert mover.span == HIGH
        assert session.hops[0].peer_id == stays.peer_id
        # Now nobody else holds the higher blocks: the session comes back to who has moved.
        blow = Blow(after=5, strike=lambda: bed.kill(bed.nodes[0]))
        again_BL = run_with_blow(alone, model, session, output_BL, blow, "mover stands in")
        assert session.hops[1].peer_id == mover.peer_id
        back = _Moving(mover, LOW)
        bed.start([HIGH])
        blow = Blow(after=5, strike=back, pause_s=0.05)
        run_with_blow(alone, model, session, again_BL, blow, name)
        assert back.finish() == "moved"
        assert mover.span == LOW
        assert mover.peer_id not in {hop.peer_id for hop in session.hops}


def test_blocks_that_nobody_else_serves_are_not_given_up(
    alone: PreTrainedModel, bed: Bed, tmp_path: Path
) -> None:
    bed.start([HIGH])
    ids_BL = random_ids(1, 20)
    with (
        open_mover(bed, LOW, tmp_path) as mover,
        join_bed(bed, "chain") as model,
        model.inference_session(128) as session,
    ):
        blow = Blow(after=5, strike=lambda: answers.append(mover.ask(HIGH)))
        answers: list[str] = []
        run_with_blow(alone, model, session, ids_BL, blow, "move refused")
        assert answers == ["uncovered"]
        assert mover.ask(LOW) == "held_already"
        assert mover.ask(Span(4, 7)) == "not_of_model"
        assert mover.span == LOW


@pytest.mark.parametrize(
    "error",
    [
        InsufficientMemoryError("no room"),
        pytest.param(OSError(28, "No space left on device"), marks=pytest.mark.slow),
        pytest.param(RuntimeError("torch's own"), marks=pytest.mark.slow),
    ],
)
def test_node_goes_back_where_it_cannot_load_what_it_moves_to(
    alone: PreTrainedModel,
    bed: Bed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
) -> None:

    def fail_high(checkpoint: Any, span: Span, **options: Any) -> Any:
        if span == HIGH:
            raise error
        return load_blocks(checkpoint, span, **options)

    monkeypatch.setattr("nesa_node.server.node.served_span.load_blocks", fail_high)
    first, _ = bed.start([LOW, HIGH])
    with open_mover(bed, LOW, tmp_path) as mover:
        assert mover.ask(HIGH) == "failed"
        assert mover.span == LOW
        said = capfd.readouterr()
        # Where it goes depends on who has set up logging before.
        assert str(error) in said.out + said.err
        bed.kill(first)
        with join_bed(bed, "chain") as model, model.inference_session(64) as session:
            ids_BL = random_ids(1, 20)
            output_BL = generate(model, ids_BL, session, new_tokens=20)
            assert session.hops[0].peer_id == mover.peer_id
            assert_undisturbed(alone, output_BL, ids_BL, new_tokens=20)


def test_node_that_is_stopped_while_it_loads_leaves_in_order(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def load_high_slowly(checkpoint: Any, span: Span, **options: Any) -> Any:
        if span == HIGH:
            loading.set()
            assert go_on.wait(20)
        return load_blocks(checkpoint, span, **options)

    monkeypatch.setattr("nesa_node.server.node.served_span.load_blocks", load_high_slowly)
    bed.start([LOW, HIGH])
    with open_mover(bed, LOW, tmp_path) as mover:
        moving = _Moving(mover, HIGH)
        moving()
        assert loading.wait(20)
        assert not mover.ready_path.exists()
        mover.stop()
        go_on.set()
        assert moving.finish() == "ended"
    assert not mover.ready_path.exists()
    assert peers_in_directory(bed.addresses) == {node.peer_id for node in bed.nodes}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_several_sessions_go_on_while_a_node_moves_to_and_fro(
    alone: PreTrainedModel, bed: Bed, tmp_path: Path
) -> None:
    bed.start([HIGH])
    failures: list[BaseException] = []
    stop = threading.Event()

    def work(routing: RouteName, seed: int) -> None:
        try:
            with join_bed(bed, routing) as model:
                while not stop.is_set():
                    ids_BL = random_ids(1, 20, seed=seed)
                    with model.inference_session(128) as session:
                        output_BL = generate(model, ids_BL, session, new_tokens=40)
                    assert_undisturbed(alone, output_BL, ids_BL, new_tokens=40)
                    seed += 10
        except BaseException as error:
            failures.append(error)

    with open_mover(bed, LOW, tmp_path) as mover:
        routings: tuple[RouteName, ...] = ("chain", "chain", "star")
        workers = [
            threading.Thread(target=work, args=(routing, seed))
            for seed, routing in enumerate(routings)
        ]
        for worker in workers:
            worker.start()
        try:
            bed.start([LOW])
            answers = [mover.ask(span) for span in (HIGH, LOW) * 3]
        finally:
            stop.set()
            for worker in workers:
                worker.join()
    assert not failures, failures
    assert answers == ["moved"] * 6


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_last_two_holders_do_not_both_give_their_blocks_up(bed: Bed, tmp_path: Path) -> None:
    bed.start([HIGH])
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with open_mover(bed, LOW, first) as one, open_mover(bed, LOW, second) as other:
        for _ in range(4):
            moving = [_Moving(one, HIGH), _Moving(other, HIGH)]
            for each in moving:
                each()
            answers = sorted(each.finish() for each in moving)
            assert answers in (["moved", "uncovered"], ["uncovered", "uncovered"])
            for mover in (one, other):
                if mover.span == HIGH:
                    assert mover.ask(LOW) == "moved"
