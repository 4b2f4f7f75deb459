"""`nesa-node demo`: a swarm of four daemons on this machine, compared with transformers."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from cyclopts import Parameter

from nesa_node.cli.flags import Flags, load_command_config
from nesa_node.cli.process_setup import exit_on_interrupt
from nesa_node.cli.standard_streams import check_utf8
from nesa_node.core.errors import ConfigError, require_node
from nesa_node.core.ids import Span, split_evenly
from nesa_node.core.wait_tracking import track_wait

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from nesa_node.cli.services.local_swarm import LocalNode
    from nesa_node.cli.text_generation import GenerationParams, TimedAnswer
    from nesa_node.core.settings.models import SharedConfig
    from nesa_node.routing.chains import Hop

DEFAULT_QUESTION = "What is the capital of France?"
TIMED_PROMPT = "Describe how a lighthouse works."
TOKENS_DIFFER_EXIT_CODE = 10
MIN_NODES_WITH_REPLICA = 4
"""Fewest daemons with which the last one is a replica."""
MAX_NODES = 16
NODE_FLAGS = ("--torch-dtype", "float32", "--device", "cpu", "--threads", "1")


def demo(
    model: Annotated[
        str | None, Parameter(help="A local folder. [default: SmolLM2-135M-Instruct]")
    ] = None,
    /,
    *,
    question: Annotated[str, Parameter(metavar="TEXT", help="What to ask.")] = DEFAULT_QUESTION,
    nodes: Annotated[int, Parameter(help="How many daemons to start.")] = 4,
    max_new_tokens: Annotated[int, Parameter(help="Most tokens of the answer.")] = 64,
    timed_tokens: Annotated[int, Parameter(help="Tokens of the timed run.")] = 64,
    serve: Annotated[
        bool,
        Parameter(negative=(), help="Then keep the swarm running, with a gateway and a dashboard."),
    ] = False,
    flags: Flags["SharedConfig"] | None = None,
) -> int:
    """Start four daemons here, ask them a question, compare with local transformers.

    Three hold the model; the fourth is a replica of node-2, so that node-2 may be killed.
    Everything is computed in float32 with one thread per process. The exit code is 0 if every
    token is the same. The daemons are stopped in any case.
    """
    from nesa_node.core.settings.models import ClientConfig

    config = load_command_config(ClientConfig, flags)
    if nodes < 1 or max_new_tokens < 1 or timed_tokens < 2:
        raise ConfigError(
            "--nodes and --max-new-tokens must be positive, --timed-tokens at least 2"
        )
    check_utf8(question, "the question")
    if nodes > MAX_NODES:
        raise ConfigError(f"--nodes {nodes}: at most {MAX_NODES}, all of them run on this machine")
    require_node("nesa-node demo")
    with exit_on_interrupt():
        import torch
        from transformers.utils import logging as transformers_logging

        from nesa_node.cli.services.local_swarm import local_swarm, serve_until_stopped
        from nesa_node.engine.weights.demo_model import DEMO_MODEL_NAME, demo_model_path
        from nesa_node.engine.weights.hub import open_checkpoint

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    if model is None and not (config.cache_dir / DEMO_MODEL_NAME).is_dir():
        print(f"{DEMO_MODEL_NAME}: converted once, from its GGUF file\n", flush=True)
    with track_wait("the demo model to be converted"):
        folder = demo_model_path(config.cache_dir) if model is None else Path(model)
    checkpoint = open_checkpoint(str(folder), cache_dir=config.cache_dir)
    spans = split_demo_blocks(checkpoint.num_blocks, nodes)
    print(
        f"{checkpoint.name}: {checkpoint.num_blocks} blocks in float32 on "
        f"{len(spans)} daemons of this machine\n",
        flush=True,
    )
    prompts = (
        DemoPrompt(question, max_new_tokens),
        DemoPrompt(TIMED_PROMPT, timed_tokens, timed=True),
    )
    with (
        _unwind_on_signals(),
        tempfile.TemporaryDirectory(prefix="nesa-demo-") as temporary,
        local_swarm(folder, spans, Path(temporary), flags=NODE_FLAGS) as daemons,
    ):
        answers, num_hops = _ask_swarm(folder, daemons, prompts)
        if serve:
            code = _print_comparison(answers, num_hops, _ask_transformers(folder, prompts))
            serve_until_stopped(folder, daemons, NODE_FLAGS, Path(temporary), question)
            return code
    return _print_comparison(answers, num_hops, _ask_transformers(folder, prompts))


def split_demo_blocks(num_blocks: int, nodes: int) -> tuple[Span, ...]:
    """Split the blocks evenly; with four or more nodes the last is a replica of the second."""
    if nodes < MIN_NODES_WITH_REPLICA:
        return tuple(split_evenly(num_blocks, nodes))
    spans = tuple(split_evenly(num_blocks, nodes - 1))
    return (*spans, spans[min(1, len(spans) - 1)])


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A prompt of the demo. If `timed`, exactly `tokens` are generated and not shown."""

    text: str
    tokens: int
    timed: bool = False

    def sampling(self) -> GenerationParams:
        from nesa_node.cli.text_generation import GenerationParams

        return GenerationParams(
            max_new_tokens=self.tokens, min_new_tokens=self.tokens if self.timed else None
        )

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
        from nesa_node.cli.text_generation import encode_messages

        message = {"role": "user", "content": self.text}
        return encode_messages(tokenizer, [message], template=tokenizer.chat_template is not None)


def _ask_swarm(
    folder: Path, nodes: Sequence[LocalNode], prompts: Sequence[DemoPrompt]
) -> tuple[list[TimedAnswer], int]:
    """Answers of the swarm, and the number of nodes of the last one's chain."""
    from nesa_node.cli.text_generation import generate_answer
    from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
    from nesa_node.engine.weights.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    _print_nodes(nodes)
    with AutoDistributedModelForCausalLM.from_pretrained(
        folder, initial_peers=nodes[0].addresses, dtype="float32"
    ) as model:
        answers = []
        for prompt in prompts:
            ids_1L = prompt.encode(tokenizer)
            with model.inference_session(ids_1L.shape[1] + prompt.tokens) as session:
                if not prompt.timed:
                    print(f"\n  question      {prompt.text}\n  answer        ", end="", flush=True)
                out = None if prompt.timed else sys.stdout
                answers.append(
                    generate_answer(
                        model, tokenizer, ids_1L, prompt.sampling(), out=out, session=session
                    )
                )
                hops = session.hops
        _print_chain(hops, nodes)
    return answers, len(hops)


def _ask_transformers(folder: Path, prompts: Sequence[DemoPrompt]) -> list[TimedAnswer]:
    import torch
    from transformers import AutoModelForCausalLM

    from nesa_node.cli.text_generation import generate_answer
    from nesa_node.engine.weights.tokenizer import load_tokenizer

    with track_wait("transformers' own answers in this process"):
        tokenizer = load_tokenizer(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        )
        return [
            generate_answer(model, tokenizer, prompt.encode(tokenizer), prompt.sampling(), out=None)
            for prompt in prompts
        ]


def _print_nodes(nodes: Sequence[LocalNode]) -> None:
    import asyncio

    from nesa_node.cli.swarm_reader import read_swarm
    from nesa_node.cli.views.swarm import group_by_model, print_models
    from nesa_node.core.settings.models import ClientConfig

    for node in nodes:
        serves = f"serves {node.startup_s:.1f} s after its start"
        print(f"  {node.name}  blocks {node.span!s:>5}  {serves}")
    print(flush=True)
    config = ClientConfig(initial_peers=nodes[0].addresses)
    print_models(group_by_model(asyncio.run(read_swarm(config)).records))
    sys.stdout.flush()


def _print_chain(hops: Sequence[Hop], nodes: Sequence[LocalNode]) -> None:
    names = {node.peer_id: node.name for node in nodes}
    chain = " → ".join(f"{names.get(hop.peer_id, hop.peer_id)} {hop.span}" for hop in hops)
    print(f"\n  chain         {chain}")
    peaks = ", ".join(f"{node.peak_memory_bytes() / 2**20:.0f}" for node in nodes)
    print(f"  memory        {peaks} MiB at the peak of each daemon")


def _print_comparison(
    answers: Sequence[TimedAnswer], num_hops: int, local: Sequence[TimedAnswer]
) -> int:
    """Print both timings and whether the tokens are equal; the last answer was timed."""
    timed = answers[-1]
    mine = [token for one in answers for token in one.token_ids]
    theirs = [token for one in local for token in one.token_ids]
    equal = sum(a == b for a, b in zip(mine, theirs, strict=False))
    same = mine == theirs
    print(
        f"  swarm         {timed.tokens_per_s:.1f} tokens/s through {num_hops} daemons, "
        f"{timed.first_token_s * 1000:.0f} ms to the first token\n"
        f"  transformers  {local[-1].tokens_per_s:.1f} tokens/s in one process, "
        f"{local[-1].first_token_s * 1000:.0f} ms to the first token\n"
        f"  tokens equal local transformers: {'yes' if same else 'NO'} "
        f"({equal} of {max(len(mine), len(theirs))})"
    )
    return 0 if same else TOKENS_DIFFER_EXIT_CODE


@contextmanager
def _unwind_on_signals() -> Iterator[None]:
    """Unwind the stack on SIGTERM and SIGINT, so that each `finally` runs.

    An exception raised in a signal handler is lost if a destructor is running, so it is raised
    again each second until the stack unwinds.
    """

    def stop(number: int, _frame: object) -> None:
        signal.signal(signal.SIGALRM, lambda *_: None if sys.exception() else give_up(number))
        signal.setitimer(signal.ITIMER_REAL, 1, 1)
        give_up(number)

    def give_up(number: int) -> NoReturn:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
