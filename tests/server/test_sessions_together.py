"""Whatever else runs, a session gets what it gets alone."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from nesa_node.engine.cache.pages import PageTable
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk, TokenSlice
from nesa_node.server.scheduler.policy import MAX_ITERATION_TOKENS
from nesa_node.server.scheduler.session_queue import PRIORITIES
from nesa_node.swarm.protocol.messages import (
    Cancel,
    Close,
    Closed,
    Linked,
    Opened,
    Reordered,
    RolledBack,
)
from tests.server.bench import Node, Peer, open_node

CLIENTS = ("a", "b", "c")
MAX_TOKENS = 200
TOLERANCE = 1e-5


@dataclass
class Rollback:
    lengths: list[int]


@dataclass
class Fork:
    """Each row goes on as a copy of row `sources[row]`."""

    sources: list[int]


@dataclass
class Burst:
    """Steps that are sent without waiting for outputs."""

    steps: list[dict[int, int]]
    hidden: list[Tensor]


@dataclass
class Script:
    """What one session does."""

    rows: int
    acts: list[Rollback | Fork | Burst] = field(default_factory=list)

    @classmethod
    def draw(cls, rng: random.Random, hidden_size: int) -> Script:
        script = cls(rng.choice([1, 1, 2, 5]))
        lengths = [0] * script.rows
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        for _ in range(rng.randint(2, 12)):
            if rng.random() < 0.2 and any(lengths):
                lengths = [rng.randint(0, length) for length in lengths]
                script.acts.append(Rollback(list(lengths)))
                continue
            if rng.random() < 0.25 and script.rows > 1:
                sources = rng.choices(range(script.rows), k=script.rows)
                lengths = [lengths[source] for source in sources]
                script.acts.append(Fork(sources))
                continue
            burst = Burst([], [])
            for _ in range(rng.choice([1, 1, 1, 2, 4])):
                rows = rng.sample(range(script.rows), rng.randint(1, script.rows))
                most = rng.choice([1, 1, 1, 8, 70])
                counts = {
                    row: rng.randint(1, min(most, MAX_TOKENS - lengths[row]))
                    for row in rows
                    if lengths[row] < MAX_TOKENS
                }
                if not counts:
                    continue
                for row, count in counts.items():
                    lengths[row] += count
                total = sum(counts.values())
                burst.steps.append(counts)
                burst.hidden.append(torch.randn(total, hidden_size, generator=generator))
            script.acts.append(burst)
        return script


def alone(script: Script, blocks: ModelBlocks) -> list[Tensor]:
    """The outputs of all steps, each row of each run by itself. No pages are shared."""
    pool = blocks.new_pool(script.rows * (MAX_TOKENS + 32))
    promise = pool.reserve(pool.num_pages)
    tables = [promise.new_table() for _ in range(script.rows)]
    inputs = [torch.empty(0, blocks.hidden_size) for _ in range(script.rows)]
    outputs = []
    for act in script.acts:
        if isinstance(act, Rollback):
            for table, length in zip(tables, act.lengths, strict=True):
                table.truncate(length)
            inputs = [fed[:length] for fed, length in zip(inputs, act.lengths, strict=True)]
            continue
        if isinstance(act, Fork):
            inputs = [inputs[source] for source in act.sources]
            for table, fed_LD in zip(tables, inputs, strict=True):
                table.truncate(0)
                _append(table, fed_LD, blocks)
            continue
        for counts, hidden_TD in zip(act.steps, act.hidden, strict=True):
            parts = []
            pieces = torch.split(hidden_TD, list(counts.values()))
            for row, hidden_LD in zip(counts, pieces, strict=True):
                parts.append(_append(tables[row], hidden_LD, blocks))
                inputs[row] = torch.cat([inputs[row], hidden_LD])
            outputs.append(torch.cat(parts))
    return outputs


def _append(table: PageTable, hidden_LD: Tensor, blocks: ModelBlocks) -> Tensor:
    if not len(hidden_LD):
        return hidden_LD
    table.reserve(table.length + len(hidden_LD))
    return blocks.forward(hidden_LD, [RowChunk(table, len(hidden_LD))])


async def play(node: Node, script: Script, rng: random.Random) -> list[Tensor]:
    """Run a script in a session of its own, and return the outputs of all steps."""
    await _pause(rng)
    peer = node.peer(rng.choice(CLIENTS))
    peer.open(rows=script.rows, max_tokens=MAX_TOKENS, priority=rng.choice(PRIORITIES))
    await peer.wire.hear_a(Opened)
    peer.link()
    await peer.wire.hear_a(Linked)
    outputs = []
    for act in script.acts:
        await _pause(rng)
        if isinstance(act, Rollback):
            peer.rollback(act.lengths)
            await peer.wire.hear_a(RolledBack)
            continue
        if isinstance(act, Fork):
            peer.reorder(act.sources)
            await peer.wire.hear_a(Reordered)
            continue
        sent = []
        for counts, hidden_TD in zip(act.steps, act.hidden, strict=True):
            sent.append(peer.step(counts, hidden_TD))
            await _pause(rng)
        for step in sent:
            output, hidden_TD = await peer.output()
            assert (output.step, output.rows) == (step.step, step.rows)
            outputs.append(hidden_TD)
    peer.wire.say(Close())
    await peer.wire.hear_a(Closed)
    return outputs


async def disturb(node: Node, rng: random.Random) -> None:
    """Sessions that change their mind, cancel or go while their steps run."""
    for _ in range(6):
        peer: Peer = node.peer("d")
        rows = rng.randint(1, 3)
        peer.open(rows=rows, max_tokens=MAX_TOKENS, priority=rng.choice(PRIORITIES))
        await peer.wire.hear_a(Opened)
        peer.link()
        for _ in range(rng.randint(1, 4)):
            peer.step({row: rng.randint(1, 40) for row in range(rows)})
            await _pause(rng)
        if rng.random() < 0.5:
            await peer.output()
            # Refused if other steps are still under way: then so is the rest of what it does.
            peer.reorder(rng.choices(range(rows), k=rows))
            peer.step(dict.fromkeys(range(rows), 5))
            await _pause(rng)
        ending = rng.choice(["rollback", "cancel", "go"])
        if ending == "rollback":
            peer.rollback([0] * rows)
            peer.step(dict.fromkeys(range(rows), 20))
            await _pause(rng)
        if ending == "go":
            peer.wire.hang_up()
        else:
            peer.wire.say(Cancel())
        await peer.wire.hear_the_end()


async def _pause(rng: random.Random) -> None:
    for _ in range(rng.choice([0, 1, 3])):
        await asyncio.sleep(0)
    if rng.random() < 0.2:
        await asyncio.sleep(rng.uniform(0, 0.01))


def assert_same(found_TD: Tensor, expected_TD: Tensor) -> None:
    bound = TOLERANCE * expected_TD.abs().max()
    assert (found_TD - expected_TD).abs().max() <= bound
    best_T2 = expected_TD.topk(2).values
    decided_T = best_T2[:, 0] - best_T2[:, 1] > 2 * bound
    assert torch.equal(found_TD.argmax(-1)[decided_T], expected_TD.argmax(-1)[decided_T])


@pytest.mark.parametrize("seed", range(6))
async def test_every_session_gets_what_it_gets_alone(blocks: ModelBlocks, seed: int) -> None:
    rng = random.Random(seed)
    scripts = [Script.draw(rng, blocks.hidden_size) for _ in range(14)]
    assert any(isinstance(act, Fork) for script in scripts for act in script.acts)
    expected = [alone(script, blocks) for script in scripts]
    async with open_node(blocks, tokens=32_768) as node:
        async with asyncio.TaskGroup() as tasks:
            playing = [
                tasks.create_task(play(node, script, random.Random(rng.random())))
                for script in scripts
            ]
            tasks.create_task(disturb(node, random.Random(rng.random())))
        assert node.pool.held_pages == 0
        assert node.pool.unreserved_pages == node.pool.num_pages
    for played, outputs in zip(playing, expected, strict=True):
        assert len(played.result()) == len(outputs)
        for found_TD, expected_TD in zip(played.result(), outputs, strict=True):
            assert_same(found_TD, expected_TD)


async def test_a_short_step_of_256_rows_leaves_others_their_turns(
    blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut into pieces between them, and comes to what it comes to alone."""
    counts = dict.fromkeys(range(256), 8)
    hidden_TD = torch.randn(256 * 8, blocks.hidden_size, generator=torch.manual_seed(1))
    [expected_TD] = alone(Script(256, [Burst([counts], [hidden_TD])]), blocks)
    sizes: list[int] = []
    run = ModelBlocks.forward_buffers

    def noted(blocks: ModelBlocks, pieces: Sequence[TokenSlice], runs: Sequence[RowChunk]) -> None:
        sizes.append(sum(run.count for run in runs))
        run(blocks, pieces, runs)

    monkeypatch.setattr(ModelBlocks, "forward_buffers", noted)
    async with open_node(blocks, tokens=32_768) as node:
        wide, other = node.peer("wide"), node.peer("other")
        await wide.begin(rows=256)
        await other.begin(max_tokens=MAX_TOKENS)
        wide.step(counts, hidden_TD)
        computing = asyncio.create_task(wide.output())
        steps = 0
        while not computing.done() and steps < MAX_TOKENS:
            other.step({0: 1})
            await other.output()
            steps += 1
        _, found_TD = await computing
        await wide.end()
        await other.end()
    assert_same(found_TD, expected_TD)
    assert max(sizes) <= MAX_ITERATION_TOKENS
    assert steps >= 2048 // MAX_ITERATION_TOKENS // 2


async def test_pages_of_256_beams_are_not_copied_on_the_event_loop(
    blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied_here: list[bool] = []
    replace_shared = PageTable._copy_on_write

    def noted(table: PageTable, index: int) -> None:
        copied_here.append(threading.current_thread() is threading.main_thread())
        replace_shared(table, index)

    monkeypatch.setattr(PageTable, "_copy_on_write", noted)
    generator = torch.manual_seed(1)
    prompt_TD, beams_TD = (
        torch.randn(tokens, blocks.hidden_size, generator=generator) for tokens in (31, 256)
    )
    prompt, beams = {0: 31}, dict.fromkeys(range(256), 1)
    script = Script(256)
    script.acts += [Burst([prompt], [prompt_TD]), Fork([0] * 256), Burst([beams], [beams_TD])]
    expected = alone(script, blocks)
    async with open_node(blocks, tokens=32_768) as node:
        peer = node.peer()
        await peer.begin(rows=256)
        copied_here.clear()
        peer.step(prompt, prompt_TD)
        outputs = [(await peer.output())[1]]
        peer.reorder([0] * 256)
        await peer.wire.hear_a(Reordered)
        peer.step(beams, beams_TD)
        outputs.append((await peer.output())[1])
        await peer.end()
    assert copied_here == [False] * 255
    for found_TD, expected_TD in zip(outputs, expected, strict=True):
        assert_same(found_TD, expected_TD)
