"""A daemon that holds a span of one assigned model, as a child process of the pool's member.

A process of its own frees all memory, of the GPU too, when it ends, and its crash takes no other
model with it. It ends when the member does, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from nesa_node.core.ids import Span
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.models import NodeConfig
from nesa_node.swarm.dht.pool_notices import AssignedSpan, HeldModel, HeldState
from nesa_node.swarm.p2p.tasks import stop_process

log = get_logger(__name__)

STOP_TIMEOUT_S = 45.0
"""Longer than a node takes to drain and withdraw."""
_OWN_FIELDS = frozenset(
    {
        "model",
        "api",
        "metrics",
        "http",
        "orchestrator",
        "ready_file",
        "initial_peers",
    }
)
"""Settings that are not passed on as they are, beside those of the pool."""
_MAX_LINES = 20
_ERROR_PATTERN = re.compile(r"(?:^|\s)error: (.*)")


class ChildNode:
    """One assigned model: `nesa-node run MODEL` from its start to its end."""

    def __init__(
        self, assigned: AssignedSpan, model: str, config: NodeConfig, peers: Sequence[str]
    ):
        """`model` is a folder or a hub name, `peers` are addresses to join through."""
        self.assigned = assigned
        self._model = model
        self._config = config
        self._peers = peers
        self._folder = Path(tempfile.mkdtemp(prefix="nesa-pool-"))
        self._last_lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._is_leaving = False
        self._failure = ""

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    def held(self) -> HeldModel:
        """State for the offer; the span is the present one, which moves can have changed."""
        state: HeldState = "loading"
        span, node, model_id = self.assigned.span, None, ""
        ready = self._read_ready_file()
        if ready is not None:
            state, node, model_id = "serving", ready["peer_id"], ready["model"]
            span = (ready["span"][0], ready["span"][1])
        if self._is_leaving:
            state = "leaving"
        elif self.has_ended:
            state = "failed"
        return HeldModel(
            model=self.assigned.model,
            state=state,
            span=span,
            quant_type=self.assigned.quant_type,
            model_id=model_id,
            node=node,
            reason=self._failure[:240],
        )

    async def run(self) -> None:
        """Start the process and wait for its end; stop it when cancelled."""
        settings = child_settings(self._config, self.assigned, self._folder)
        path = self._folder / "settings.toml"
        path.touch(mode=0o600)
        path.write_text(write_toml(settings), encoding="utf-8")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("NESA_")}
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "nesa_node", "run", self._model, "--while-stdin", "--config", str(path)),
            *(f"--initial-peers={peer}" for peer in self._peers),
            # The node ends when this pipe closes, so also when this process is killed.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            # Ctrl-C in the terminal must reach only the member, which stops its nodes.
            start_new_session=True,
        )
        try:
            await self._forward_output(process)
            code = await process.wait()
            self._failure = self._describe_failure(code)
            log.warning("assigned_node_ended", model=self.assigned.model, reason=self._failure)
        finally:
            await self._stop(process)

    async def _forward_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while line := await process.stderr.readline():
            text = line.decode("utf-8", "replace").rstrip()
            self._last_lines.append(text)
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    def _describe_failure(self, code: int) -> str:
        for line in reversed(self._last_lines):
            if found := _ERROR_PATTERN.search(line):
                return "".join(char for char in found[1] if char.isprintable())
        return f"the process ended with exit code {code}"

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            self._is_leaving = True
            forwarding = asyncio.ensure_future(self._forward_output(process))
            try:
                await stop_process(process, STOP_TIMEOUT_S)
            finally:
                forwarding.cancel()
                await asyncio.gather(forwarding, return_exceptions=True)
        await asyncio.to_thread(_remove_folder, self._folder)

    def _read_ready_file(self) -> dict[str, Any] | None:
        try:
            content: dict[str, Any] = json.loads((self._folder / "ready.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return content


def _remove_folder(folder: Path) -> None:
    for path in folder.glob("*"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def child_settings(
    config: NodeConfig, assigned: AssignedSpan, folder: Path
) -> Mapping[str, object]:
    """Settings of the child: the member's own, and what was assigned."""
    settings = {
        name: getattr(config, name)
        for name in type(config).model_fields
        if name not in _OWN_FIELDS and not name.startswith("pool_")
    }
    return settings | {
        "first_blocks": assigned.blocks,
        "num_blocks": None,
        "weight_memory_gib": None,
        "block_indices": None,
        "quant_type": assigned.quant_type,
        "torch_dtype": assigned.dtype,
        "attn_cache_tokens": assigned.cache_tokens,
        "training_gib": config.training_gib or 0,
        "max_disk_gib": config.pool_disk_gib,
        "evict_downloads": True,
        "pool_max_download_gib": config.pool_max_download_gib,
        "identity_path": child_identity_path(config.identity_path, assigned.model),
        # The member listens at its own port.
        "host_maddrs": [_any_port(address) for address in config.host_maddrs],
        "announce_maddrs": [],
        "ready_file": folder / "ready.json",
    }


def child_identity_path(identity_path: Path, model: str) -> Path:
    """A key file beside the member's: the same for a model whenever it comes back."""
    return identity_path.with_name(f"{identity_path.stem}.{model.replace('/', '--')}.key")


def _any_port(address: str) -> str:
    return re.sub(r"/(tcp|udp)/\d+", r"/\1/0", address)


def write_toml(settings: Mapping[str, object]) -> str:
    """Settings as a TOML file; None is left out, secrets are written as they are."""
    lines = []
    for name, value in settings.items():
        if value is not None:
            lines.append(f"{name} = {_toml_value(value)}\n")
    return "".join(lines)


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml_value, value))}]"
    # JSON's strings are TOML's basic strings, but for surrogates, which no setting has.
    assert isinstance(value, str | Path | Span), f"{value!r} is no setting"
    return json.dumps(str(value), ensure_ascii=False)
