"""Where a node gets quotes from: entries of the kernel's configfs, and programs."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
import threading
import uuid
from pathlib import Path

import pytest

from nesa_node.core.errors import AttestationError, ConfigError
from nesa_node.core.settings.choices import AttestationSource
from nesa_node.server.attestation import quote_sources
from nesa_node.server.attestation.quote_sources import (
    TSM_FOLDER,
    CommandSource,
    TsmSource,
    make_quote_source,
    read_certificate_table,
)
from nesa_node.verification.attestation.check import verify_quote
from nesa_node.verification.attestation.policy import KindPolicy
from tests.verification.attestation.made_quotes import AT, snp_quote, snp_root

GUIDS = {
    "root": "c0b406a4-a803-4952-9743-3fb6014cd0ae",
    "authority": "4ab7b379-bbac-4fe4-a02f-05aef327c782",
    "key": "63da758d-e664-4564-adc5-f4b93be8accd",
}
DATA = bytes(range(64))


def certificate_table(certificates: dict[str, bytes]) -> bytes:
    """A table as AMD 56421 defines it: entries, an empty one, then the certificates."""
    at = 24 * (len(certificates) + 1)
    entries = b""
    for name, encoded in certificates.items():
        place = at.to_bytes(4, "little") + len(encoded).to_bytes(4, "little")
        entries += uuid.UUID(GUIDS[name]).bytes + place
        at += len(encoded)
    return entries + bytes(24) + b"".join(certificates.values())


class SimulatedKernel:
    """Attributes of an entry appear with its folder, and go with it, as in configfs."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, provider: str = "sev_guest", generation: str = "1"
    ) -> None:
        self.left: set[Path] = set()
        self._provider, self._generation = provider, generation
        make = Path.mkdir

        def mkdir(path: Path, *args: object) -> None:
            make(path)
            self.left.add(path)
            self._fill(path)

        def rmdir(path: Path) -> None:
            shutil.rmtree(path)
            self.left.discard(path)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        monkeypatch.setattr(Path, "rmdir", rmdir)

    def _fill(self, entry: Path) -> None:
        (entry / "provider").write_text(f"{self._provider}\n")
        (entry / "generation").write_text(f"{self._generation}\n")
        key, authority, root = snp_quote(DATA).certificates
        table = certificate_table({"root": root, "key": key, "authority": authority})
        (entry / "auxblob").write_bytes(table)
        os.mkfifo(entry / "outblob")
        threading.Thread(target=self._sign, args=(entry,), daemon=True).start()

    def _sign(self, entry: Path) -> None:
        try:
            with (entry / "outblob").open("wb") as file:
                file.write(snp_quote((entry / "inblob").read_bytes()).report)
        except FileNotFoundError:
            pass  # nothing was asked to be signed


async def test_snp_quote_is_read_from_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = SimulatedKernel(monkeypatch)
    (quote,) = await TsmSource(tmp_path).quotes(DATA)
    assert (quote.kind, quote.report[0x50:0x90]) == ("snp", DATA)
    rule = KindPolicy(measurements={"any": ("any",)}, roots=snp_root().pem)
    assert verify_quote(quote, rule, AT).report_data == DATA
    assert not kernel.left


async def test_entry_that_another_process_wrote_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = SimulatedKernel(monkeypatch, generation="2")
    with pytest.raises(AttestationError, match="another process"):
        await TsmSource(tmp_path).quotes(DATA)
    assert not kernel.left


def test_unknown_hardware_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimulatedKernel(monkeypatch, provider="arm_cca_guest")
    with pytest.raises(ConfigError, match="arm_cca_guest"):
        TsmSource(tmp_path).find_kind()
    assert not kernel.left


def test_folder_without_rights_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/proc/nesa-[0-9a-f]{16}: "):
        TsmSource(Path("/proc")).find_kind()


@pytest.mark.parametrize(
    "table",
    [
        b"",
        bytes(48),
        certificate_table({"key": b"0" * 9})[:-1],
        uuid.UUID(GUIDS["key"]).bytes + b"\xff" * 8,
        uuid.UUID(int=1).bytes + (24).to_bytes(4, "little") + bytes(4),
    ],
)
def test_table_without_certificates_is_refused(table: bytes) -> None:
    with pytest.raises(AttestationError):
        read_certificate_table(table)


@pytest.mark.skipif(TSM_FOLDER.exists(), reason="this machine gives quotes")
@pytest.mark.parametrize("source", ["tdx", "snp"])
def test_machine_without_quotes_says_so(source: AttestationSource) -> None:
    with pytest.raises(ConfigError, match="this machine gives no quotes: there is no /sys"):
        make_quote_source(source, None)


@pytest.mark.skipif(TSM_FOLDER.exists(), reason="this machine gives quotes")
@pytest.mark.parametrize("source", ["none", "auto"])
def test_no_source_where_none_is_asked_for_or_had(source: AttestationSource) -> None:
    assert make_quote_source(source, None) is None


@pytest.mark.parametrize(
    ("source", "command"), [("command", None), ("auto", "program"), ("none", "program")]
)
def test_command_needs_both_settings(source: AttestationSource, command: str | None) -> None:
    with pytest.raises(ConfigError, match="go together"):
        make_quote_source(source, command)


@pytest.mark.parametrize("command", ["", "  ", "'unclosed"])
def test_malformed_command_is_named(command: str) -> None:
    with pytest.raises(ConfigError, match="attestation_command"):
        CommandSource(command)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('[]')", "no list of quotes"),
        ("print('{')", "no list of quotes"),
        ("print('[' * 100_000)", "no list of quotes"),
        ('print(\'[{"kind": "tpm", "report": ""}]\')', "no list of quotes"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
async def test_program_that_prints_no_quotes_is_refused(program: str, message: str) -> None:
    source = CommandSource(shlex.join((sys.executable, "-c", program)))
    with pytest.raises(AttestationError, match=message):
        await source.quotes(DATA)


async def test_program_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quote_sources, "COMMAND_TIMEOUT_S", 0.2)
    with pytest.raises(AttestationError, match="no quotes within"):
        await CommandSource("sh -c 'sleep 60'").quotes(DATA)


async def test_missing_program_is_an_os_error() -> None:
    with pytest.raises(OSError, match="no-such-program"):
        await CommandSource("/no-such-program").quotes(DATA)
    await asyncio.sleep(0)
