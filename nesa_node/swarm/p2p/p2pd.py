"""p2pd, the libp2p daemon of a node: a child process and a private directory with its sockets.

p2pd runs as long as the persistent connection to it is open (`control.py`), so that it ends with
this process even on SIGKILL. A killed process leaves its runtime directory with two dead sockets,
which the next start removes.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import fcntl
import functools
import hashlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

from nesa_node.core.errors import AddressInUseError, ConfigError, SwarmError
from nesa_node.core.logging import escape_lines, get_logger
from nesa_node.swarm.p2p.hivemind_imports import P2PD_PATH, Multiaddr

log = get_logger(__name__)

P2PD_SHA256 = "42f8f48e62583b97cdba3c31439c08029fb2b9fc506b5bdd82c46b7cc1d279d8"
"""Digest of the p2pd in hivemind 1.1.12's wheel; no other binary is started."""

_START_TIMEOUT_S = 20.0
_EXIT_GRACE_S = 0.3
_STOP_TIMEOUT_S = 3.0
_UNCONNECTED_EXIT_S = 20
_MAX_SOCKET_PATH_BYTES = 100
_DIRECTORY_PREFIX = "nesa-node-"
_NEW_DIRECTORY_PREFIX = ".nesa-node-new-"


class P2pdProcess:
    """A running p2pd process. `lost` is set when it has ended, for whatever reason."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path) -> None:
        self.process = process
        self.control_path = directory / "p2pd.sock"
        self.streams_path = directory / "streams.sock"
        self.exited = asyncio.Event()
        self.last_lines: collections.deque[str] = collections.deque(maxlen=20)
        self._ready = asyncio.Event()

    async def watch(self) -> None:
        """Read p2pd's output until it ends. Runs as a task for the whole life of the process."""
        assert self.process.stdout is not None
        while line := await self._read_line(self.process.stdout):
            self.last_lines.append(line)
            log.debug("p2pd_output", line=line)
            if line.startswith("Peer ID:"):
                self._ready.set()
        await self.process.wait()
        self.exited.set()
        self._ready.set()

    async def wait_until_ready(self) -> None:
        """Wait for p2pd to print its peer id.

        Raises `AddressInUseError` or `SwarmError` with p2pd's last output line if it ended, and
        `SwarmError` after `_START_TIMEOUT_S`.
        """
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._ready.wait()
        except TimeoutError as error:
            raise SwarmError(f"p2pd did not start within {_START_TIMEOUT_S:.0f} s") from error
        if self.exited.is_set():
            line = self.last_lines[-1].strip() if self.last_lines else "no output"
            if "address already in use" in line:
                raise AddressInUseError(
                    f"cannot listen: {line}; choose another port with --host-maddrs"
                )
            raise SwarmError(f"libp2p's daemon did not start: {line}")

    @staticmethod
    async def _read_line(stdout: asyncio.StreamReader) -> str:
        try:
            line = await stdout.readline()
        except ValueError:  # longer than the reader's limit; the reader has dropped the line
            return "(overlong line)\n"
        return escape_lines(line.decode(errors="replace"))


@asynccontextmanager
async def start_p2pd(
    *,
    identity_path: Path,
    host_maddrs: Sequence[str],
    announce_maddrs: Sequence[str],
    trusted_relays: Sequence[str],
    nat_port_map: bool,
    auto_nat: bool,
    relay: bool,
    listen: bool,
    asks_for_addresses: bool,
) -> AsyncIterator[P2pdProcess]:
    """Run p2pd for as long as the context lasts, then stop it and wait for it.

    A client that does not ask peers for addresses names them no peer that it cannot reach.

    Raises `ConfigError` for a malformed address, `AddressInUseError` if a port is in use, and
    `SwarmError` for an address that this machine does not have, a port that needs a privilege, or a
    binary that is not hivemind's.
    """
    for address in (*host_maddrs, *announce_maddrs, *trusted_relays):
        parse_multiaddr(address)
    check_binary(P2PD_PATH)
    if listen:
        _check_listen_addresses(host_maddrs)
    with _runtime_directory() as directory:
        arguments = [
            f"-id={identity_path}",
            f"-listen=/unix{directory / 'p2pd.sock'}",
            f"-idleTimeout={_UNCONNECTED_EXIT_S}s",
            f"-natPortMap={int(nat_port_map)}",
            f"-autonat={int(auto_nat)}",
            f"-relay={int(relay)}",
            f"-autoRelay={int(relay)}",
            f"-relayService={int(relay)}",
            "-b=0",
            "-tls=1",
            "-connManager=1",
            *(["-dhtServer=1"] if listen else ["-dhtClient=1"] if asks_for_addresses else []),
            f"-hostAddrs={','.join(host_maddrs)}" if listen else "-noListenAddrs=1",
        ]
        if announce_maddrs:
            arguments.append(f"-announceAddrs={','.join(announce_maddrs)}")
        if relay and trusted_relays:
            arguments.append(f"-trustedRelays={','.join(trusted_relays)}")
            # With discovery, p2pd would wait for three minutes before it uses these relays.
            arguments.append("-relayDiscovery=0")
        async with _run_child(arguments, directory) as daemon:
            yield daemon


def check_binary(path: str) -> None:
    """Raise `SwarmError` if the binary is not the one that was tested, byte for byte.

    p2pd reads this node's private key, so that a replaced binary must not run.
    """
    try:
        status = os.stat(path)
        digest = _sha256_of(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise SwarmError(
            f"cannot read libp2p's daemon {path}: {error.strerror}; hivemind ships it for "
            "Linux on x86-64 only"
        ) from error
    if digest != P2PD_SHA256:
        raise SwarmError(
            f"{path} has SHA-256 {digest}, hivemind 1.1.12 ships {P2PD_SHA256}; "
            "`pip install --force-reinstall --no-deps hivemind==1.1.12` puts it back"
        )


@functools.lru_cache(maxsize=4)
def _sha256_of(path: str, mtime_ns: int, size: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@asynccontextmanager
async def _run_child(arguments: Sequence[str], directory: Path) -> AsyncIterator[P2pdProcess]:
    environment = {**os.environ, "GOLOG_LOG_FMT": "json"}
    environment.setdefault("GOLOG_LOG_LEVEL", "error")
    try:
        process = await asyncio.create_subprocess_exec(
            P2PD_PATH,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            # Ctrl-C in a terminal goes to the whole process group; p2pd must run until this node
            # has withdrawn its record.
            start_new_session=True,
        )
    except OSError as error:
        raise SwarmError(
            f"cannot run libp2p's daemon {P2PD_PATH}: {error.strerror}; hivemind ships it for "
            "Linux on x86-64 only"
        ) from error
    daemon = P2pdProcess(process, directory)
    watcher = asyncio.create_task(daemon.watch(), name="p2pd-output")
    try:
        await daemon.wait_until_ready()
        yield daemon
    finally:
        await _stop(process, watcher)


async def _stop(process: asyncio.subprocess.Process, watcher: asyncio.Task[None]) -> None:
    """Wait, then terminate, then kill: p2pd ends by itself when its last client disconnects."""
    done, _ = await asyncio.wait({watcher}, timeout=_EXIT_GRACE_S)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if done:
            break
        # Not process.send_signal: that may reap a child which asyncio itself waits for.
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
        done, _ = await asyncio.wait({watcher}, timeout=_STOP_TIMEOUT_S)
    watcher.cancel()
    await asyncio.wait({watcher})


def parse_multiaddr(text: str) -> Multiaddr:
    """Parse a multiaddress. Raises `ConfigError` that quotes the text."""
    try:
        return Multiaddr(text)
    except Exception as error:  # the parser raises a dozen unrelated types
        raise ConfigError(
            f"{text!r} is not a multiaddress; they look like /ip4/1.2.3.4/tcp/31330 or, for a "
            "peer, /ip4/1.2.3.4/tcp/31330/p2p/12D3KooW..."
        ) from error


def _check_listen_addresses(host_maddrs: Sequence[str]) -> None:
    """Check that each address can be bound.

    p2pd would share a port in use (it sets SO_REUSEPORT), or skip an address silently.
    """
    for text in host_maddrs:
        parts = text.strip("/").split("/")
        fields = dict(zip(parts[::2], parts[1::2], strict=False))
        kind = socket.SOCK_DGRAM if "udp" in fields else socket.SOCK_STREAM
        port = int(fields.get("tcp") or fields.get("udp") or 0)
        host = fields.get("ip4") or fields.get("ip6")
        if host is None:
            continue
        family = socket.AF_INET if "ip4" in fields else socket.AF_INET6
        with suppress(OSError), socket.socket(family, kind) as probe:
            if kind == socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if (refusal := _listen_error(error, text, host, port)) is not None:
                    raise refusal from error


def _listen_error(error: OSError, text: str, host: str, port: int) -> SwarmError | None:
    """Error for an address that cannot be bound; None if p2pd is to try it all the same."""
    match error.errno:
        case errno.EADDRINUSE:
            return AddressInUseError(
                f"cannot listen on {text}: port {port} is in use; stop the other program "
                "or choose another port with --host-maddrs"
            )
        case errno.EADDRNOTAVAIL if not ip_address(host).is_unspecified:
            every = "::" if ":" in host else "0.0.0.0"
            return SwarmError(
                f"cannot listen on {text}: this machine has no such address; listen on "
                f"{text.replace(host, every, 1)}, and pass what peers dial to --announce-maddrs"
            )
        case errno.EACCES:
            return SwarmError(
                f"cannot listen on {text}: port {port} needs a privilege; choose one above 1023, "
                "which needs none, with --host-maddrs"
            )
    return None


@contextmanager
def _runtime_directory() -> Iterator[Path]:
    """Create a directory for this user only, locked while in use and removed at the end."""
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) > _MAX_SOCKET_PATH_BYTES - 50:
        raise SwarmError(f"{base} is too long a path for sockets; set TMPDIR to a shorter one")
    remove_stale_directories(base)
    # Locked under a name that `remove_stale_directories` ignores, then renamed, so that a directory
    # with a swept name is always either locked or stale.
    fresh = Path(tempfile.mkdtemp(prefix=_NEW_DIRECTORY_PREFIX, dir=base))
    descriptor = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    directory = fresh.with_name(
        f"{_DIRECTORY_PREFIX}{os.getuid()}-{fresh.name.removeprefix(_NEW_DIRECTORY_PREFIX)}"
    )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        fresh.rename(directory)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(fresh, ignore_errors=True)
        os.close(descriptor)


def remove_stale_directories(base: Path) -> None:
    """Remove the runtime directories of processes that were killed."""
    for path in base.glob(f"{_DIRECTORY_PREFIX}{os.getuid()}-*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
    for path in base.glob(f"{_NEW_DIRECTORY_PREFIX}*"):
        with suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > 60:
                path.rmdir()
