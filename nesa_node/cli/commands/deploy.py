"""`nesa-node deploy`: a model's blocks on members that learn neither its name nor their place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from nesa_node.cli.flags import LIMITS, OUTPUT, SWARM, Flags, load_command_config
from nesa_node.cli.process_setup import exit_on_interrupt
from nesa_node.core.errors import ConfigError, require_node

if TYPE_CHECKING:
    from nesa_node.core.settings.models import PoolClientConfig
    from nesa_node.swarm.node import Swarm

_CHANGES = ("rotate", "move", "withdraw")


def deploy(
    model: Annotated[str, Parameter(help="The model: a folder, or a name on the hub.")],
    /,
    *,
    to: Annotated[
        tuple[str, ...],
        Parameter(
            group=SWARM,
            negative=(),
            metavar="ADDRESS",
            show_default=False,
            help="Address of a member (`nesa-node run --shards-gib N` prints it), or several, with "
            "commas; may be repeated. More than are needed are spares.",
        ),
    ] = (),
    splits: Annotated[
        int, Parameter(group=SWARM, help="Parts to cut the blocks into, each for other members.")
    ] = 2,
    verifiers: Annotated[
        int,
        Parameter(
            group=SWARM,
            help="Members that compute each block: of three, two must agree.",
        ),
    ] = 1,
    client_blocks: Annotated[
        str,
        Parameter(
            group=SWARM, metavar="K,L", help="So many first and last blocks stay on this machine."
        ),
    ] = "1,1",
    cache_tokens: Annotated[
        int, Parameter(group=LIMITS, help="Tokens of all sessions at once, at each member.")
    ] = 8192,
    file: Annotated[
        Path | None,
        Parameter(
            group=OUTPUT,
            show_default=False,
            help="What `--deployment` of clients names; a secret. "
            "[default: ~/.local/state/nesa-node/deployments/NAME.json]",
        ),
    ] = None,
    rotate: Annotated[
        bool, Parameter(group=SWARM, negative=(), help="Give the shards of --file new ids.")
    ] = False,
    move: Annotated[
        bool,
        Parameter(group=SWARM, negative=(), help="Send the shards of --file to other members."),
    ] = False,
    withdraw: Annotated[
        bool,
        Parameter(group=SWARM, negative=(), help="Have members drop the shards; delete --file."),
    ] = False,
    flags: Flags["PoolClientConfig"] | None = None,
) -> int:
    """Send parts of MODEL to members, which no DHT lists, for a client that has the rest of it.

    Members learn what a layer looks like and its weights, but no name, no place and no order; they
    see hidden states. docs/deployments.md says what that keeps, and what it does not.
    """
    require_node("nesa-node deploy")
    from nesa_node.core.settings.models import PoolClientConfig

    config = load_command_config(PoolClientConfig, flags)
    asked = [
        name for name, is_set in zip(_CHANGES, (rotate, move, withdraw), strict=True) if is_set
    ]
    if len(asked) > 1 or (asked and to):
        raise ConfigError(f"--{asked[0]} changes what --file has: leave out the other flags")
    if not asked and not to:
        raise ConfigError(
            "--to is required: addresses of members, which `nesa-node run --shards-gib N` prints"
        )
    if min(splits, verifiers, cache_tokens) < 1:
        raise ConfigError("--splits, --verifiers and --cache-tokens must be at least 1")
    with exit_on_interrupt():
        from nesa_node.client.deployment import operations
        from nesa_node.client.deployment.deployment_connection import read_deployment
        from nesa_node.client.deployment.deployment_file import DeploymentFile
        from nesa_node.compression.tensors import DTYPE_NAMES
        from nesa_node.core.settings.declaration import (
            default_deployments_dir,
            secret_text,
            user_path,
        )
        from nesa_node.engine.weights.checkpoint import compute_model_id
        from nesa_node.engine.weights.hub import open_checkpoint

    checkpoint = open_checkpoint(
        model,
        revision=config.revision,
        token=secret_text(config.token),
        cache_dir=config.cache_dir,
    )
    path = default_deployments_dir() / f"{checkpoint.name.replace('/', '--')}.json"
    target = DeploymentFile(path if file is None else user_path(file))
    addresses = [part.strip() for each in to for part in each.split(",") if part.strip()]
    if asked:
        deployment = read_deployment(target, checkpoint)
        addresses = [address for each in deployment.members.values() for address in each]
    plan = operations.DeploymentPlan(
        model=compute_model_id(checkpoint),
        addresses=tuple(addresses),
        splits=splits,
        verifiers=verifiers,
        client_blocks=_parse_pair(client_blocks),
        cache_tokens=cache_tokens,
        identity_path=str(config.identity_path),
        dtype=DTYPE_NAMES[checkpoint.resolve_dtype(config.torch_dtype)],  # type: ignore[arg-type]  # one of three
    )

    async def work(swarm: Swarm) -> None:
        match asked:
            case ["rotate"]:
                await operations.rotate(target, swarm, print)
            case ["move"]:
                await operations.move(target, checkpoint, swarm, print)
            case ["withdraw"]:
                await operations.withdraw(target, swarm, print)
            case _:
                await operations.deploy(plan, checkpoint, target, swarm, print)
                print(f"nesa-node generate {model} --deployment {target.path} PROMPT uses it")

    _run(config, addresses, work)
    return 0


def _run(
    config: PoolClientConfig, addresses: Sequence[str], work: Callable[[Swarm], Awaitable[None]]
) -> None:
    from nesa_node.client.deployment.deployment_connection import open_owner_swarm
    from nesa_node.client.routing.request import ConnectionOptions
    from nesa_node.core.settings.declaration import secret_text
    from nesa_node.swarm.p2p import tasks as event_loop

    options = ConnectionOptions(
        identity_path=config.identity_path, swarm_key=secret_text(config.swarm_key)
    )

    async def serve() -> None:
        async with open_owner_swarm(options, addresses) as swarm:
            await work(swarm)

    event_loop.run_event_loop(serve())


def _parse_pair(text: str) -> tuple[int, int]:
    try:
        first, last = map(int, text.split(","))
    except ValueError:
        raise ConfigError(f"--client-blocks {text}: give two numbers, such as 1,1") from None
    return first, last
