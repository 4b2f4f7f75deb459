"""Where a node gets quotes of its hardware from: Linux, or a program of its operator.

Linux 6.7 and newer give TDX and SEV-SNP guests quotes through configfs-tsm
(`Documentation/ABI/testing/configfs-tsm` of the kernel). NVIDIA's reports come from its driver's
library, SGX quotes from the enclave's runtime: for these an operator's program is run. None of
this could be tried on hardware.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

import msgspec

from nesa_node.core.errors import AttestationError, ConfigError
from nesa_node.core.settings.choices import AttestationSource
from nesa_node.swarm.protocol.attest_messages import CollateralPart, Quotes
from nesa_node.verification.attestation.intel import require_dcap
from nesa_node.verification.attestation.quotes import Collateral, Quote, QuoteKind

TSM_FOLDER = Path("/sys/kernel/config/tsm/report")
COMMAND_TIMEOUT_S = 60.0
MAX_COMMAND_OUTPUT_BYTES = 1 << 20
_TSM_KINDS: dict[str, QuoteKind] = {"tdx_guest": "tdx", "sev_guest": "snp"}
_CHAIN_ORDER = (
    "63da758d-e664-4564-adc5-f4b93be8accd",  # VCEK
    "a8074bc2-a25a-483e-aae6-39c045a0b8a1",  # VLEK
    "4ab7b379-bbac-4fe4-a02f-05aef327c782",  # the key that signs it
    "c0b406a4-a803-4952-9743-3fb6014cd0ae",  # AMD's root
)
"""Entries of the table that AMD's "Guest-Hypervisor Communication Block" (56421) defines, in the
order of a chain."""
_ENTRY_BYTES = 24
_MAX_ENTRIES = 16


class QuoteSource(ABC):
    """Gives quotes of this machine's hardware."""

    @abstractmethod
    async def quotes(self, report_data: bytes) -> tuple[Quote, ...]:
        """Quotes over 64 bytes. Raises `AttestationError`, and `OSError`."""


class TsmSource(QuoteSource):
    """Quotes of the confidential virtual machine that this is, from Linux."""

    def __init__(self, folder: Path = TSM_FOLDER) -> None:
        self._folder = folder

    def find_kind(self) -> QuoteKind:
        """What the kernel gives quotes of. Raises `ConfigError` if it gives none."""
        if not self._folder.is_dir():
            raise ConfigError(
                f"this machine gives no quotes: there is no {self._folder}. It has to be a TDX or "
                "SEV-SNP guest with Linux 6.7 or newer (modprobe tdx_guest or sev_guest), with "
                "configfs mounted, and this user may have to be root; or give --attestation command"
            )
        entry = self._folder / f"nesa-{secrets.token_hex(8)}"
        try:
            entry.mkdir()
            try:
                return self._read_kind(entry)
            finally:
                entry.rmdir()
        except OSError as error:
            raise ConfigError(
                f"this machine gives no quotes: {entry}: {error.strerror}; its hardware or kernel "
                "lacks them, or this user may not ask"
            ) from None

    async def quotes(self, report_data: bytes) -> tuple[Quote, ...]:
        quote = await asyncio.to_thread(self._read_quote, report_data)
        if quote.kind == "tdx":
            quote = Quote("tdx", quote.report, (), await _fetch_collateral(quote.report))
        return (quote,)

    def _read_quote(self, report_data: bytes) -> Quote:
        entry = self._folder / f"nesa-{secrets.token_hex(8)}"
        entry.mkdir()
        try:
            kind = self._read_kind(entry)
            (entry / "inblob").write_bytes(report_data)
            report = (entry / "outblob").read_bytes()
            table = b""
            with suppress(FileNotFoundError):
                table = (entry / "auxblob").read_bytes()
            # Rises with each writer of the entry: another one would have changed what was signed.
            if (entry / "generation").read_text().strip() != "1":
                raise AttestationError("malformed", "another process wrote to the kernel's entry")
        finally:
            entry.rmdir()
        return Quote(kind, report, read_certificate_table(table) if kind == "snp" else ())

    def _read_kind(self, entry: Path) -> QuoteKind:
        provider = (entry / "provider").read_text().strip()
        if provider not in _TSM_KINDS:
            raise ConfigError(f"quotes of {provider[:40]!r} are unknown here")
        return _TSM_KINDS[provider]


def read_certificate_table(table: bytes) -> tuple[bytes, ...]:
    """Certificates in the order of a chain, of the table that a SEV-SNP host gives its guest.

    Raises `AttestationError` for a table without any, or that is malformed.
    """
    found: dict[str, bytes] = {}
    for at in range(0, _MAX_ENTRIES * _ENTRY_BYTES, _ENTRY_BYTES):
        entry = table[at : at + _ENTRY_BYTES]
        if len(entry) < _ENTRY_BYTES or not any(entry):
            break
        start, size = (int.from_bytes(entry[i : i + 4], "little") for i in (16, 20))
        if start + size > len(table):
            raise AttestationError("malformed", "the host's table of certificates is malformed")
        found[str(uuid.UUID(bytes=entry[:16]))] = table[start : start + size]
    chain = tuple(found[name] for name in _CHAIN_ORDER if name in found)
    if not chain:
        raise AttestationError(
            "absent",
            "the host gives this SEV-SNP guest no certificates; have it do so, or use "
            "--attestation command",
        )
    return chain


class CommandSource(QuoteSource):
    """Quotes that an operator's program prints.

    It gets the 64 bytes as hexadecimal in its last argument, and prints a JSON list of quotes with
    the fields of `QuotePart`, bytes in base64.
    """

    def __init__(self, command: str) -> None:
        """Raises `ConfigError`."""
        try:
            self._arguments = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"attestation_command {command!r}: {error}") from None
        if not self._arguments:
            raise ConfigError("attestation_command is empty: give a program that prints quotes")

    async def quotes(self, report_data: bytes) -> tuple[Quote, ...]:
        program = self._arguments[0]
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                printed = await self._run(report_data.hex())
        except TimeoutError:
            raise AttestationError(
                "absent", f"{program} printed no quotes within {COMMAND_TIMEOUT_S:.0f} s"
            ) from None
        try:
            parts = msgspec.json.decode(printed, type=Quotes)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise AttestationError(
                "malformed", f"{program} printed no list of quotes: {error}"
            ) from None
        return tuple(part.to_quote() for part in parts)

    async def _run(self, argument: str) -> bytes:
        process = await asyncio.create_subprocess_exec(
            *self._arguments,
            argument,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that its children can be ended, too
        )
        try:
            assert process.stdout is not None
            printed = await process.stdout.read(MAX_COMMAND_OUTPUT_BYTES)
            code = await process.wait()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise
        if code:
            raise AttestationError("absent", f"{self._arguments[0]} failed with exit code {code}")
        return printed


def make_quote_source(source: AttestationSource, command: str | None) -> QuoteSource | None:
    """The source that a node's settings name; None without attestation.

    Raises `ConfigError` where this machine does not have it.
    """
    if (source == "command") != (command is not None):
        raise ConfigError("--attestation command and --attestation-command go together")
    if command is not None:
        return CommandSource(command)
    if source == "none":
        return None
    tsm = TsmSource()
    if source == "auto" and not TSM_FOLDER.is_dir():
        return None
    kind = tsm.find_kind()
    if source not in ("auto", kind):
        raise ConfigError(f"--attestation {source}: this machine's hardware is {kind}")
    if kind == "tdx":
        require_dcap()
    return tsm


async def _fetch_collateral(report: bytes) -> Collateral:
    """What Intel publishes about the platform of a quote. Raises `AttestationError`."""
    import dcap_qvl

    try:
        found = await dcap_qvl.get_collateral(dcap_qvl.INTEL_PCS_URL, report)
    except (ValueError, RuntimeError) as error:
        raise AttestationError(
            "absent", f"Intel's collateral for the quote cannot be had: {error}"
        ) from None
    names = CollateralPart.__struct_fields__
    return Collateral(**{name: getattr(found, name) for name in names})
