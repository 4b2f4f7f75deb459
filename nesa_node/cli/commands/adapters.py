"""`nesa-node adapters`: LoRA adapters that are published in the swarm of their base model."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from nesa_node.cli.flags import OUTPUT, Flags, JsonFlag, load_command_config
from nesa_node.cli.process_setup import exit_on_interrupt
from nesa_node.core.errors import ConfigError

if TYPE_CHECKING:
    from nesa_node.core.settings.models import PoolClientConfig
    from nesa_node.server.adapters.requests import AdapterClient

adapters = App(
    name="adapters", help="Publish LoRA adapters in the swarm of their model; fetch them."
)

_Model = Annotated[
    str, Parameter(help="The base model that the swarm serves: its name, folder or full id.")
]
_AdapterName = Annotated[str, Parameter(help="NAME or AUTHOR/NAME, as `adapters list` shows it.")]


def list_adapters(
    model: _Model,
    /,
    *,
    as_json: JsonFlag = False,
    flags: Flags["PoolClientConfig"] | None = None,
) -> int:
    """List the adapters that are published for MODEL."""

    async def work(client: AdapterClient) -> int:
        published = await client.published()
        if as_json:
            json.dump([each.as_json() for each in published], sys.stdout, indent=2)
            print()
        else:
            from nesa_node.cli.views.adapters import print_adapters

            print_adapters(client.model_id, published)
        return 0

    return _run(work, model, flags)


def pull(
    model: _Model,
    name: _AdapterName,
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(group=OUTPUT, help="New folder for it. [default: its name, here]"),
    ] = None,
    flags: Flags["PoolClientConfig"] | None = None,
) -> int:
    """Fetch the adapter NAME of MODEL as a folder that PEFT reads."""

    async def work(client: AdapterClient) -> int:
        from nesa_node.cli.views.adapters import format_bytes

        adapter = await client.find(name)
        folder = await client.fetch(adapter, output or Path(adapter.listed.name))
        print(f"{folder}: {adapter.name}, {format_bytes(adapter.listed.nbytes)}, checked")
        return 0

    return _run(work, model, flags)


def publish(
    model: _Model,
    folder: Annotated[Path, Parameter(help="A folder that PEFT's save_pretrained wrote.")],
    /,
    *,
    name: Annotated[
        str | None,
        Parameter(group=OUTPUT, metavar="NAME", help="Its name. [default: the folder's]"),
    ] = None,
    description: Annotated[
        str,
        Parameter(
            group=OUTPUT,
            metavar="TEXT",
            show_default=False,
            help="What it is for, in at most 200 characters.",
        ),
    ] = "",
    metric: Annotated[
        tuple[str, ...],
        Parameter(
            group=OUTPUT,
            metavar="NAME=VALUE",
            negative=(),
            show_default=False,
            help="A number to show with it: eval_loss=1.25; may be repeated. [default: what "
            "finetune has written]",
        ),
    ] = (),
    flags: Flags["PoolClientConfig"] | None = None,
) -> int:
    """Upload the LoRA adapter in FOLDER to nodes of MODEL, and announce it for 30 days."""
    metrics = dict(map(parse_metric, metric))

    async def work(client: AdapterClient) -> int:
        from nesa_node.cli.views.adapters import format_bytes

        base = Path(model)
        copies = await client.publish(
            folder,
            name=name,
            description=description,
            metrics=metrics or None,
            base=base if await asyncio.to_thread(base.is_dir) else None,
        )
        count = len(copies.nodes)
        size = format_bytes(copies.adapter.listed.nbytes)
        print(f"{copies.adapter.name}: {size} on {count} node{'s' if count != 1 else ''}")
        for peer, reason in copies.refusals.items():
            print(f"not on {peer[-8:]}: {reason}", file=sys.stderr)
        return 0

    return _run(work, model, flags)


def remove(
    model: _Model,
    name: Annotated[str, Parameter(help="The name under which this identity published it.")],
    /,
    *,
    flags: Flags["PoolClientConfig"] | None = None,
) -> int:
    """Withdraw this identity's adapter NAME of MODEL; nodes delete it within minutes."""

    async def work(client: AdapterClient) -> int:
        await client.remove(name)
        print(f"{name}: no longer published")
        return 0

    return _run(work, model, flags)


def parse_metric(text: str) -> tuple[str, float]:
    """Read `eval_loss=1.25`. Raises `ConfigError`."""
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ConfigError(f"--metric {text}: a name and a number such as eval_loss=1.25") from None


def _run(
    work: Callable[[AdapterClient], Coroutine[object, object, int]],
    model: str,
    flags: Flags["PoolClientConfig"] | None,
) -> int:
    from nesa_node.cli.client_model import resolve_initial_peers
    from nesa_node.core.settings.models import PoolClientConfig

    config: PoolClientConfig = resolve_initial_peers(
        load_command_config(PoolClientConfig, flags), model
    )
    with exit_on_interrupt():
        from nesa_node.cli.swarm_reader import open_reader
        from nesa_node.server.adapters.requests import AdapterClient
        from nesa_node.swarm.p2p.identity import Identity

    async def run() -> int:
        identity = Identity.load_or_create(config.identity_path)
        async with open_reader(config) as reader:
            return await work(await AdapterClient.open(reader, model, identity))

    return asyncio.run(run())


for _command, _name in (
    (list_adapters, "list"),
    (pull, "pull"),
    (publish, "publish"),
    (remove, "remove"),
):
    # By its path: then the parser evaluates the flags of the command that is used, not of all.
    adapters.command(f"{__name__}:{_command.__name__}", name=_name, help=_command.__doc__)
