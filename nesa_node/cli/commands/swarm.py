"""`nesa-node swarm`: ask for swarms of a pool's machines, and see what became of it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from nesa_node.cli.flags import ORCHESTRATION, POOL, Flags, JsonFlag, load_command_config
from nesa_node.cli.process_setup import exit_on_interrupt
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import is_model_name
from nesa_node.core.settings.choices import PlacementGoal, WeightQuality

if TYPE_CHECKING:
    from nesa_node.core.ids import PeerId
    from nesa_node.core.settings.models import PoolClientConfig
    from nesa_node.server.pool.dry_run import DryRun, MachineLabel
    from nesa_node.server.pool.requests import PoolClient
    from nesa_node.swarm.node import Swarm

swarm = App(name="swarm", help="Ask for swarms of the machines on offer; list and change them.")

_HOUR_S = 3600.0
_PoolModel = Annotated[
    str,
    Parameter(help="Name of a model on the hub, or of a folder in every machine's --cache-dir."),
]
_Replicas = Annotated[
    str,
    Parameter(
        group=POOL,
        metavar="N|MIN:MAX",
        help="Nodes wanted of every block; with a maximum, more where it is busy.",
    ),
]


def create(
    model: _PoolModel,
    /,
    *,
    replicas: _Replicas = "1",
    quality: Annotated[
        WeightQuality,
        Parameter(group=POOL, help="The coarsest weights: exact, high (int8), balanced (nf4)."),
    ] = "exact",
    goal: Annotated[
        PlacementGoal, Parameter(group=ORCHESTRATION, help="latency or throughput.")
    ] = "latency",
    hours: Annotated[
        float, Parameter(group=POOL, help="How long the swarm is wanted, at most 720.")
    ] = 168.0,
    wait_s: Annotated[
        float, Parameter(group=POOL, help="Longest wait until it serves; 0: return at once.")
    ] = 600.0,
    dry_run: Annotated[
        bool,
        Parameter(
            group=POOL, negative=(), help="Only show which machine would hold what, and how fast."
        ),
    ] = False,
    pool: Annotated[
        Path | None,
        Parameter(group=POOL, help="For --dry-run: a TOML file of machines, without a live pool."),
    ] = None,
    as_json: JsonFlag = False,
    flags: Flags["PoolClientConfig"] | None = None,
) -> int:
    """Build a swarm for MODEL of the machines on offer, and wait until it serves."""
    least, most = parse_replicas(replicas)
    check_name(model)
    if not 0 < hours <= 720:
        raise ConfigError(f"--hours {hours:g}: more than 0, at most 720")
    for given, flag in ((pool is not None, "--pool"), (as_json, "--json")):
        if given and not dry_run:
            raise ConfigError(f"{flag} is for a dry run: give --dry-run, too")
    if dry_run:
        return _show_dry_run(model, least, quality, goal, pool, flags, as_json=as_json)

    async def work(pool: PoolClient, _: Swarm) -> int:
        await pool.request(
            model,
            replicas=least,
            max_replicas=most,
            quality=quality,
            goal=goal,
            until=time.time() + hours * _HOUR_S,
        )
        return await _wait(pool, model, wait_s)

    return _run(work, flags)


def _show_dry_run(
    model: str,
    replicas: int,
    quality: WeightQuality,
    goal: PlacementGoal,
    pool: Path | None,
    flags: Flags["PoolClientConfig"] | None,
    *,
    as_json: bool,
) -> int:
    from nesa_node.cli.client_model import resolve_initial_peers
    from nesa_node.core.settings.models import PoolClientConfig

    config: PoolClientConfig = load_command_config(PoolClientConfig, flags)
    if pool is None:
        config = resolve_initial_peers(config)
    with exit_on_interrupt():
        from nesa_node.cli.swarm_reader import open_reader
        from nesa_node.cli.views.pool import print_dry_run
        from nesa_node.server.pool.dry_run import Wanted, plan_on_pool, plan_with_file

    wanted = Wanted(model, replicas, quality, goal)

    async def plan_live() -> tuple[DryRun, Mapping[PeerId, MachineLabel]]:
        async with open_reader(config) as reader:
            return await plan_on_pool(reader, config, wanted)

    if pool is None:
        planned, labels = asyncio.run(plan_live())
    else:
        planned, labels = plan_with_file(pool, config, wanted)
    print_dry_run(wanted, planned, labels, as_json=as_json)
    return 0


def scale(
    model: _PoolModel, replicas: _Replicas, /, *, flags: Flags["PoolClientConfig"] | None = None
) -> int:
    """Change the number of nodes wanted of every block of MODEL."""
    least, most = parse_replicas(replicas)
    check_name(model)

    async def work(pool: PoolClient, _: Swarm) -> int:
        await pool.scale(model, least, most)
        print(f"{model}: {_replicas_text(least, most)} asked for")
        return 0

    return _run(work, flags)


def remove(model: _PoolModel, /, *, flags: Flags["PoolClientConfig"] | None = None) -> int:
    """Give the machines of MODEL's swarm back to the pool, once their sessions have moved."""
    check_name(model)

    async def work(pool: PoolClient, _: Swarm) -> int:
        await pool.remove(model)
        print(f"{model}: removal asked for")
        return 0

    return _run(work, flags)


def list_swarms(
    *, as_json: JsonFlag = False, flags: Flags["PoolClientConfig"] | None = None
) -> int:
    """List the swarms that were asked for, and what became of them."""

    return _run_view("swarms", flags, as_json=as_json)


def show(
    model: _PoolModel,
    /,
    *,
    as_json: JsonFlag = False,
    flags: Flags["PoolClientConfig"] | None = None,
) -> int:
    """Show MODEL's swarm: its machines, their spans, states and speeds, and the reasons."""
    check_name(model)

    async def work(pool: PoolClient, reader: Swarm) -> int:
        from nesa_node.cli.views.pool import print_swarm
        from nesa_node.server.pool.dry_run import measure_rtts_ms

        everything = await pool.view()
        view = everything.of_model(model)
        nodes = {each.node for offer in view.offers for each in offer.held if each.model == model}
        records = [
            record for record in await reader.directory.fetch_all() if record.peer_id in nodes
        ]
        addresses = {record.signer: record.addresses for record in records}
        rtts_ms = await measure_rtts_ms(reader, addresses)
        print_swarm(model, everything, records, rtts_ms, as_json=as_json)
        return 0

    return _run(work, flags)


def pool(*, as_json: JsonFlag = False, flags: Flags["PoolClientConfig"] | None = None) -> int:
    """List the machines on offer: device, memory, what they hold."""

    return _run_view("machines", flags, as_json=as_json)


def _run_view(
    shown: Literal["swarms", "machines"],
    flags: Flags["PoolClientConfig"] | None,
    *,
    as_json: bool,
) -> int:
    """Read the pool and print a table of it, or all as JSON."""

    async def work(pool: PoolClient, _: Swarm) -> int:
        view = await pool.view()
        if as_json:
            json.dump(view.as_json(), sys.stdout, indent=2)
            print()
        else:
            from nesa_node.cli.views.pool import print_machines, print_swarms

            (print_swarms if shown == "swarms" else print_machines)(view)
        return 0

    return _run(work, flags)


def parse_replicas(text: str) -> tuple[int, int]:
    """Read `2` or `1:3`. Raises `ConfigError`."""
    least, _, most = text.partition(":")
    try:
        pair = int(least), int(most or least)
    except ValueError:
        raise ConfigError(f"--replicas {text}: a number such as 2, or two such as 1:3") from None
    if not 1 <= pair[0] <= pair[1] <= 100:
        raise ConfigError(f"--replicas {text}: from 1 to 100, the smaller number first")
    return pair


def check_name(model: str) -> None:
    if not is_model_name(model):
        raise ConfigError(
            f"{model!r:.140} cannot be asked for: other machines do not have this one's folders; "
            "give a name on the hub, or of a folder in every machine's --cache-dir"
        )


def _replicas_text(least: int, most: int) -> str:
    return f"{least} replica{'s' if least != 1 else ''}" + (f", at most {most}" * (most > least))


async def _wait(pool: PoolClient, model: str, wait_s: float) -> int:
    """Print each change of the swarm's state until it serves. Raises `SwarmError` if refused."""
    status = await pool.wait_until_serving(model, wait_s, lambda text: print(text, flush=True))
    if status is None and wait_s:
        print(f"{model}: still asked for; `nesa-node swarm list` shows it")
    return 0


def _run(
    work: Callable[[PoolClient, Swarm], Coroutine[Any, Any, int]],
    flags: Flags["PoolClientConfig"] | None,
) -> int:
    from nesa_node.cli.client_model import resolve_initial_peers
    from nesa_node.core.settings.models import PoolClientConfig

    config: PoolClientConfig = resolve_initial_peers(load_command_config(PoolClientConfig, flags))
    with exit_on_interrupt():
        from nesa_node.cli.swarm_reader import open_reader
        from nesa_node.server.pool.requests import PoolClient
        from nesa_node.swarm.p2p.identity import Identity

    async def run() -> int:
        identity = Identity.load_or_create(config.identity_path)
        async with open_reader(config) as reader:
            return await work(PoolClient(reader.notices, identity), reader)

    return asyncio.run(run())


for _command, _name in (
    (create, "create"),
    (list_swarms, "list"),
    (show, "show"),
    (scale, "scale"),
    (remove, "remove"),
    (pool, "pool"),
):
    # By its path: then the parser evaluates the flags of the command that is used, not of all.
    swarm.command(f"{__name__}:{_command.__name__}", name=_name, help=_command.__doc__)
