"""How a node is found: the printed join command, the known-swarms file and the ready file.

The ready file exists exactly as long as a daemon serves.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

from nesa_node.compression.tensors import DTYPE_NAMES
from nesa_node.core.errors import ConfigError, NesaError
from nesa_node.core.ids import Span
from nesa_node.core.known_swarms import KnownSwarmStore
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.declaration import default_known_swarms_dir
from nesa_node.core.settings.models import NodeConfig, PeerConfig
from nesa_node.server.node.node_model import NodeModel
from nesa_node.swarm.directory import Directory
from nesa_node.swarm.node import Swarm

log = get_logger(__name__)

OTHER_COPIES_TIMEOUT_S = 30.0
MAX_COPIES_LOGGED = 4


def print_invitation(config: PeerConfig, swarm: Swarm) -> None:
    """Print the command that joins this swarm, on a first node or a bootstrap node.

    One plain line on stdout, to be copied; a log event where logs are JSON.
    """
    address = most_reachable_address(swarm.transport.addresses)
    if address is None or (config.initial_peers and isinstance(config, NodeConfig)):
        return
    command = join_command(config, address)
    if config.log_format == "json":
        log.info("invitation_printed", command=command)
        return
    # The terminal may be gone; the node continues.
    with suppress(OSError):
        print(f"{_heading(config, address)}:\n{command}", flush=True)


def _heading(config: PeerConfig, address: str) -> str:
    if not _is_loopback(address):
        return "join with another machine"
    if all(_is_loopback(each) for each in config.host_maddrs):
        why = "this one listens on this machine only: --host-maddrs /ip4/0.0.0.0/tcp/0 listens for "
        return f"join from this machine ({why}other machines)"
    why = "no address is known that other machines reach: --announce-maddrs names one"
    return f"join from this machine ({why})"


def join_command(config: PeerConfig, address: str) -> str:
    """A shell command. A private swarm's key is named by its path, never by its value."""
    model = config.model if isinstance(config, NodeConfig) else "MODEL"
    words = ["nesa-node", "run", *filter(None, [model]), "--initial-peers", address]
    if config.swarm_key is not None:
        words += ["--swarm-key", "@PATH"]
    return shlex.join(words)


async def warn_of_other_copies(directory: Directory, model_id: str) -> None:
    """Log once if the swarm serves different weights under the name of `model_id`.

    Such nodes are another swarm, which the operator may have meant to join. Returns in any case,
    after at most `OTHER_COPIES_TIMEOUT_S`.
    """
    name = model_id.partition("@")[0]
    try:
        async with asyncio.timeout(OTHER_COPIES_TIMEOUT_S):
            records = await directory.fetch_all()
    except (TimeoutError, NesaError) as error:
        log.debug("other_copies_not_listed", reason=str(error))
        return
    served = {record.model_id for record in records} - {model_id}
    copies = sorted(each for each in served if each.partition("@")[0] == name)
    if copies:
        log.warning(
            "other_copy_served",
            served=", ".join(copies[:MAX_COPIES_LOGGED]),
            here=model_id,
            advice="these weights differ, so that each session uses one or the other; to serve "
            "the same, use the files or the --revision that those nodes have",
        )


@contextmanager
def register_known_swarm(
    config: NodeConfig, addresses: Sequence[str], model_id: str
) -> Iterator[None]:
    """Register the swarm for commands on this machine: now through this node, later by lasting
    addresses.

    Loopback addresses are not kept: nodes of this machine are found while they run.
    """
    known = KnownSwarmStore(default_known_swarms_dir())
    lasting = [address for address in (*config.initial_peers, *addresses) if _reachability(address)]
    if lasting:
        known.save_last(lasting, model_id)
    with known.register_node(addresses, model_id, config.public_name):
        yield


def most_reachable_address(addresses: Sequence[str]) -> str | None:
    """The address that most machines can reach: a public one before a LAN's before loopback."""
    return max(addresses, key=_reachability, default=None)


def _reachability(address: str) -> int:
    _, protocol, host, *_ = address.split("/")
    if not protocol.startswith("ip"):
        return 4
    ip = ip_address(host)
    if ip.is_loopback or ip.is_link_local:
        return 0
    return (3 if ip.is_global else 2) if ip.version == 4 else 1


def _is_loopback(address: str) -> bool:
    _, protocol, host, *_ = address.split("/")
    return ip_address(host).is_loopback if protocol.startswith("ip") else host == "localhost"


def ready_file_fields(
    swarm: Swarm, served: NodeModel | None = None, span: Span | None = None
) -> Mapping[str, object]:
    """The file's content."""
    return {
        "peer_id": swarm.identity.peer_id,
        "addresses": list(swarm.transport.addresses),
        "model": None if served is None else served.model_id,
        "span": None if span is None else [span.start, span.end],
        "dtype": None if served is None else DTYPE_NAMES[served.dtype],
        "quant_type": None if served is None else served.quant_type,
        "cache_dtype": None if served is None else served.cache_dtype,
    }


@contextmanager
def ready_file(path: Path | None, fields: Mapping[str, object]) -> Iterator[None]:
    """Write `fields` to `path` atomically, and remove the file on exit. Without a path, no file.

    Raises `ConfigError` if it cannot be written.
    """
    if path is None:
        yield
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the ready file {path}: {error.strerror}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def check_ready_file(path: Path | None) -> None:
    """Check before loading that the file can be written. Raises `ConfigError`."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"--ready-file {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"--ready-file {path} is a folder")
    path.unlink(missing_ok=True)
