"""Sessions at honest daemons, of which every hop is audited: who is accused, and do tokens differ?

Daemons of the demo model serve chains and stars, whose links use several codecs. Sessions are
single rows, batches, prompts in chunks, beams, reused prefixes, rollbacks and sixteen at once. In
float32 nodes are also killed, and leave and hand their sessions over, in the middle of a session;
there tokens are compared with transformers'. `honest-audits` has many more audits, without daemons.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.generation import TokenTimes
from benchmarks.models import load_local, model_folder, random_prompt
from benchmarks.options import Dtype, Options, Quant
from benchmarks.results import print_table
from benchmarks.swarms import READY_TIMEOUT_S, daemon_flags, open_local, torch_threads
from nesa_node.cli.services.local_swarm import local_swarm
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.verification.audit_record import AuditRecord
from nesa_node.client.verification.auditor import Auditor
from nesa_node.core.errors import WrongActivationsError
from nesa_node.core.ids import split_evenly
from nesa_node.core.settings.choices import RouteName
from tests.faults.bed import Bed, open_bed
from tests.faults.nursery import open_nursery

DEFAULTS = Options(model="demo", nodes=(3,), runs=20, new_tokens=40, sessions=(16,))
QUICK = Options(model="tiny", nodes=(2,), runs=1, new_tokens=12, sessions=(2,))
CACHE_TOKENS = 16384
ROUTES: tuple[RouteName, ...] = ("chain", "star")
QUALITIES = ("none", "lossless", "int8", "blockwise8")
KINDS: tuple[tuple[Dtype, Quant], ...] = (
    ("bfloat16", "none"),
    ("float32", "int8"),
    ("bfloat16", "nf4"),
)
LONG_PROMPT = 300
"""Tokens of a prompt that is sent in several chunks."""


@dataclass
class Found:
    """What was seen of one kind of sessions."""

    sessions: int = 0
    records: list[AuditRecord] = field(default_factory=list)
    different: int = 0
    """Sessions whose tokens are not those of transformers."""
    errors: list[str] = field(default_factory=list)

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(record.outcome for record in self.records)


@dataclass(frozen=True, slots=True)
class Client:
    """A client of one route and quality, and where its audits' records go."""

    model: DistributedModelForCausalLM
    options: Options
    found: Found

    def generate(self, prompt_BL: Tensor, **options: Any) -> Tensor:
        self.found.sessions += 1
        given = {"max_new_tokens": self.options.new_tokens, "do_sample": False, **options}
        given["min_new_tokens"] = given["max_new_tokens"]
        output: Tensor = self.model.generate(
            prompt_BL, attention_mask=torch.ones_like(prompt_BL), **given
        )
        return output

    def prompt(self, tokens: int, seed: int, rows: int = 1) -> Tensor:
        return torch.cat(
            [random_prompt(self.model, tokens, 64 * seed + row) for row in range(rows)]
        )


def run(options: Options) -> list[dict[str, Any]]:
    with model_folder(options) as folder, torch_threads(0):
        rows: list[dict[str, Any]] = []
        for dtype, quant_type in KINDS if options.model == "demo" else ():
            rows += _serve_calmly(folder, replace(options, dtype=dtype, quant_type=quant_type))
        rows += _serve_and_lose(folder, options)
    show(rows)
    return rows


def _serve_calmly(folder: Path, options: Options) -> Iterator[dict[str, Any]]:
    spans = split_evenly(open_local(folder).num_blocks, options.nodes[0])
    with (
        TemporaryDirectory(prefix="nesa-bench-") as temporary,
        local_swarm(
            folder,
            spans,
            Path(temporary),
            flags=daemon_flags(options, CACHE_TOKENS),
            ready_timeout_s=READY_TIMEOUT_S,
        ) as nodes,
    ):
        addresses = [node.addresses[0] for node in nodes]
        yield from _run_shapes(folder, addresses, options)


def _serve_and_lose(folder: Path, options: Options) -> Iterator[dict[str, Any]]:
    spans = split_evenly(open_local(folder).num_blocks, options.nodes[0])
    local = load_local(folder, options)
    with (
        TemporaryDirectory(prefix="nesa-bench-") as temporary,
        open_nursery() as nursery,
        open_bed(nursery, folder, Path(temporary)) as bed,
    ):
        flags = ["--log-level", "warning"]
        bed.start(spans * 2, *flags)
        yield from _run_shapes(folder, bed.addresses, options)
        for title, number, standby in (
            ("node killed, replayed", signal.SIGKILL, False),
            ("node killed, standby", signal.SIGKILL, True),
            ("node leaves, hand-over", signal.SIGTERM, False),
        ):
            found = Found()
            for turn in range(options.runs):
                _lose_one(bed, local, options, found, turn, number, standby=standby)
                bed.forget_dead()
                missing = Counter(spans * 2) - Counter(node.span for node in bed.nodes)
                bed.start(list(missing.elements()), *flags)
            yield _describe(options, title, found)


def _run_shapes(
    folder: Path, addresses: Sequence[str], options: Options
) -> Iterator[dict[str, Any]]:
    for title, use in SHAPES.items():
        found = Found()
        for route in ROUTES:
            for quality in QUALITIES:
                with (
                    _client(folder, addresses, options, found, route, quality) as client,
                    suppress(WrongActivationsError),  # counted by its record
                ):
                    use(client)
        yield _describe(options, title, found)


@contextmanager
def _client(
    folder: Path,
    addresses: Sequence[str],
    options: Options,
    found: Found,
    route: RouteName,
    quality: str,
    **more: Any,
) -> Iterator[Client]:
    """A client that audits all; at its end, all audits were made."""
    with AutoDistributedModelForCausalLM.from_pretrained(
        folder,
        initial_peers=addresses,
        dtype=options.torch_dtype,
        routing=route,
        quality=quality,
        audit=1.0,
        **more,
    ) as model:
        model.join()
        connection: Any = model._ensure_connection()
        auditor: Auditor = connection._auditor
        auditor.history._path = None
        finish = auditor._finish

        async def finish_noted(session: bytes, record: AuditRecord) -> Any:
            found.records.append(record)
            return await finish(session, record)

        with patch.object(auditor, "_finish", finish_noted):
            yield Client(model, options, found)
            model.close()


def _single_rows(client: Client) -> None:
    for tokens in (1, 17):
        client.generate(client.prompt(tokens, tokens))


def _batch(client: Client) -> None:
    client.generate(client.prompt(16, 3, rows=4))


def _long_prompt(client: Client) -> None:
    client.generate(client.prompt(LONG_PROMPT, 4), max_new_tokens=8)


def _beams(client: Client) -> None:
    client.generate(client.prompt(12, 5), num_beams=3)


def _prefix_and_rollback(client: Client) -> None:
    """The second prompt reuses a prefix; the third goes back within its session."""
    prompt = client.prompt(80, 6)
    edited = torch.cat([prompt[:, :70], client.prompt(9, 7)], 1)
    client.generate(prompt, max_new_tokens=8)
    client.generate(edited, max_new_tokens=8)
    with client.model.inference_session(max_length=200) as session:
        client.generate(prompt, session=session, max_new_tokens=8)
        client.generate(edited, session=session, max_new_tokens=8)


def _at_once(client: Client) -> None:
    count = client.options.sessions[0]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda seed: client.generate(client.prompt(16, seed)), range(count)))


SHAPES: dict[str, Callable[[Client], None]] = {
    "single rows": _single_rows,
    "batches of 4 rows": _batch,
    "prompts in chunks": _long_prompt,
    "beams": _beams,
    "prefixes and rollbacks": _prefix_and_rollback,
    "sixteen at once": _at_once,
}


def _lose_one(
    bed: Bed,
    local: Any,
    options: Options,
    found: Found,
    turn: int,
    number: signal.Signals,
    *,
    standby: bool,
) -> None:
    """One session, of which a node is lost after some tokens."""
    route = "chain" if standby else ROUTES[turn % len(ROUTES)]
    with _client(
        bed.model, bed.addresses, options, found, route, "none", replicate_cache=standby
    ) as client:
        prompt = client.prompt(20, 100 + turn)
        after = 5 + turn % (options.new_tokens // 2)
        with client.model.inference_session(max_length=20 + options.new_tokens) as session:

            def lose(tokens: int) -> None:
                if tokens == after:
                    hop = session.hops[turn % len(session.hops)]
                    bed[hop.peer_id].process.send_signal(number)

            given = client.generate(prompt, session=session, streamer=TokenTimes(lose))
            try:
                session.finish()
            except WrongActivationsError as error:
                found.errors.append(str(error))
        expected = local.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=options.new_tokens,
            min_new_tokens=options.new_tokens,
            do_sample=False,
        )
        found.different += not torch.equal(given, expected)


def _describe(options: Options, title: str, found: Found) -> dict[str, Any]:
    of_allowed = [each.of_allowed for each in found.records if each.of_allowed is not None]
    row = {
        "dtype": options.dtype,
        "quantization": options.quant_type,
        "sessions_are": title,
        "sessions": found.sessions,
        "outcomes": dict(found.outcomes),
        "largest_of_allowed": max(of_allowed, default=None),
        "different_tokens": found.different,
        "errors": found.errors,
        "not_passed": [asdict(each) for each in found.records if each.outcome != "passed"][:20],
    }
    print(options.dtype, options.quant_type, title, row["outcomes"], flush=True)
    return row


OUTCOMES = "passed", "failed", "unclear", "uncalibrated", "not audited"


def show(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        "Audits of sessions at honest daemons",
        "|".join(("dtype|weights|sessions are|sessions", *OUTCOMES, "other tokens")),
        [
            [
                row["dtype"],
                row["quantization"],
                row["sessions_are"],
                str(row["sessions"]),
                *(str(row["outcomes"].get(outcome, 0)) for outcome in OUTCOMES),
                str(row["different_tokens"]),
            ]
            for row in rows
        ],
    )
