"""What a repository's author writes and a hub passes on, and a certificate of a libp2p peer."""

from __future__ import annotations

import datetime
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import httpx2
import huggingface_hub
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from huggingface_hub import HfApi

from nesa_node.client.model.auto import load_generation_config
from nesa_node.engine.weights.checkpoint import Checkpoint, list_weight_files
from nesa_node.engine.weights.families import read_config
from nesa_node.engine.weights.files import Progress, check_side_files
from nesa_node.engine.weights.hub import HubFile, HubRepository, _find_files
from nesa_node.engine.weights.tokenizer import (
    load_discovered_tokenizer,
    load_tokenizer,
    sanitize_tokenizer,
)
from nesa_node.swarm.p2p import dial_addresses as peer_lookup
from tests.api.tokenizers import byte_level_tokenizer
from tests.fuzz.file_targets import CONFIG, header_seeds, in_memory_folder
from tests.fuzz.mutation import JSON
from tests.fuzz.target import Parse, Target

_COMMIT = "a" * 40
_LISTING = {
    "_id": "1", "id": "evil/model", "modelId": "evil/model", "sha": _COMMIT, "private": False,
    "tags": ["x"], "downloads": 0, "likes": 0, "createdAt": "2026-01-01T00:00:00.000Z",
    "cardData": {"license": "mit", "base_model": ["a/b"]}, "gated": "auto",
    "config": {"architectures": ["A"], "tokenizer_config": {"chat_template": "x"}},
    "safetensors": {"parameters": {"F32": 12}, "total": 12}, "pipeline_tag": "text-generation",
    "siblings": [
        {"rfilename": "config.json", "size": 100, "blobId": "b" * 40},
        {"rfilename": "model.safetensors", "size": 1 << 40, "blobId": "c" * 40,
         "lfs": {"sha256": "d" * 64, "size": 1 << 40, "pointerSize": 134}},
    ],
}  # fmt: skip


@contextmanager
def _answering(answer: Callable[[httpx2.Request], httpx2.Response]) -> Iterator[HfApi]:
    """A client of a hub that answers so, without network."""
    transport = httpx2.MockTransport(answer)
    huggingface_hub.set_client_factory(lambda: httpx2.Client(transport=transport))
    try:
        yield HfApi(endpoint="http://hub.invalid")
    finally:
        huggingface_hub.close_session()


@contextmanager
def _listings() -> Iterator[Parse]:
    body = b""
    with (
        _answering(lambda _: httpx2.Response(200, content=body)) as api,
        in_memory_folder() as folder,
    ):

        def parse(data: bytes) -> None:
            nonlocal body
            body = data
            _, found = _find_files(api, "evil/model", None)
            assert all(isinstance(file.size, int) for file in found.values())
            list_weight_files(set(found), folder, name="evil/model")

        yield parse


@contextmanager
def _headers() -> Iterator[Parse]:
    """A weight file's header as it is read over the network."""
    body = b""
    with _answering(lambda _: httpx2.Response(206, content=body)) as api:
        files = {"a.safetensors": HubFile("a.safetensors", 100, "d" * 64, is_lfs=True)}
        repository = HubRepository(
            api, "evil/model", _COMMIT, files, Path("unused"), max_disk_bytes=None, evicts=False
        )

        def parse(data: bytes) -> None:
            nonlocal body
            end = data.rfind(b"}") + 1
            if end > 8 and not data[0] & 1:
                data = struct.pack("<Q", end - 8) + data[8:]
            body = data
            for info in repository.read_headers(["a.safetensors"]).values():
                assert info.numel >= 0

        yield parse


class _Folder(Checkpoint):
    """A checkpoint of which only the side files are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fetch(self, names: Iterable[str], progress: Progress | None = None) -> None:
        pass

    def tensor_digests(self) -> Mapping[str, str]:
        return {}

    def download_sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        return {}

    def require_download_allowed(self, names: Iterable[str]) -> None:
        pass

    def fetch_side_files(self) -> Path:
        check_side_files(self.folder)
        return self.folder


_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "config.json",
)  # fmt: skip


@contextmanager
def _tokenizers() -> Iterator[Parse]:
    """The first byte says which of the files it is; the others are good ones."""
    with _tokenizer_folders() as write:
        yield lambda data: write(data, load_tokenizer)


@contextmanager
def _discovered_tokenizers() -> Iterator[Parse]:
    """The same of a stranger's model. What is not refused reads and writes a text."""

    def use(folder: Path) -> None:
        tokenizer = load_discovered_tokenizer(folder)
        tokenizer.decode(tokenizer(_TEXT)["input_ids"])

    with _tokenizer_folders() as write:
        yield lambda data: write(data, use)


_TEXT = "aab  the <end> 123 \u00e9\n" * 40


@contextmanager
def _tokenizer_folders() -> Iterator[Callable[[bytes, Callable[[Path], object]], None]]:
    with tempfile.TemporaryDirectory(prefix="nesa-fuzz-") as good, in_memory_folder() as folder:
        _write_tokenizer(Path(good))

        def write(data: bytes, load: Callable[[Path], object]) -> None:
            shutil.copytree(good, folder, dirs_exist_ok=True)
            name = _TOKENIZER_FILES[data[0] % len(_TOKENIZER_FILES) if data else 0]
            (folder / name).write_bytes(data[1:])
            try:
                load(folder)
            finally:
                (folder / name).unlink()

        yield write


def _write_tokenizer(folder: Path) -> None:
    byte_level_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))


def _tokenizer_seeds() -> list[bytes]:
    with tempfile.TemporaryDirectory(prefix="nesa-fuzz-") as name:
        _write_tokenizer(Path(name))
        files = [Path(name) / file for file in _TOKENIZER_FILES]
        found = [path.read_bytes() if path.exists() else b"{}" for path in files]
    return [bytes([number]) + content for number, content in enumerate(found)]


@contextmanager
def _generation_configs() -> Iterator[Parse]:
    with in_memory_folder() as folder:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        read_config(folder, name="m")

        def parse(data: bytes) -> None:
            (folder / "generation_config.json").write_bytes(data)
            load_generation_config(_Folder(folder))

        yield parse


def _generation_seeds() -> list[bytes]:
    said = {"eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.9, "do_sample": True,
            "max_new_tokens": 9, "watermarking_config": {}, "suppress_tokens": [1]}  # fmt: skip
    return [json.dumps(said).encode()]


def _trust(*_: object) -> bool:
    return True


@contextmanager
def _certificates() -> Iterator[Parse]:
    with mock.patch("nesa_node.swarm.p2p.dial_addresses.verify_signature", new=_trust):
        yield peer_lookup._peer_of_certificate


def _certificate_seeds() -> list[bytes]:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "peer")])
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    identity = Ed25519PrivateKey.generate()
    own = identity.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    value = (
        peer_lookup._KEY_HEADER + own + peer_lookup._SIGNATURE_HEADER + identity.sign(b"anything")
    )
    keys: list[Any] = [ec.generate_private_key(ec.SECP256R1()), Ed25519PrivateKey.generate()]
    seeds = []
    for key in keys:
        made = x509.CertificateBuilder(name, name, key.public_key(), 1, start, start)
        made = made.add_extension(
            x509.UnrecognizedExtension(peer_lookup._LIBP2P_EXTENSION, value), True
        )
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=1), False)
        made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("a.b")]), False)
        signed = made.sign(key, SHA256() if key is keys[0] else None)
        seeds.append(signed.public_bytes(Encoding.DER))
    return seeds


_DER = (b"\x30\x80", b"\x30\x84\xff\xff\xff\xff", b"\xa0\x03\x02\x01\x02", b"\x02\x01\x05",
        b"\x06\x03\x55\x1d\x11", b"\x06\x03\x55\x1d\x13", b"\x05\x00", b"\x30" * 200)  # fmt: skip

_COMPONENTS = (
    b'{"type":"Sequence","normalizers":[',
    b'{"type":"Replace","pattern":{"String":"a"},"content":"',
    b'{"type":"Split","pattern":{"Regex":"(a+)+$"},"behavior":"Isolated","invert":false}',
    b'{"type":"Prepend","prepend":"', b'{"type":"ByteLevel"}', b'"normalizer":', b'"decoder":',
    b'{"type":"Strip","content":" ","start":1,"stop":0}', b'"model":{"type":"WordLevel","vocab":{',
)  # fmt: skip

TARGETS: dict[str, Target] = {
    "hub_listing": Target(
        open=_listings, seeds=lambda: [json.dumps(_LISTING).encode()], tokens=JSON, weight=0.05
    ),
    "hub_header": Target(open=_headers, seeds=header_seeds, tokens=JSON, weight=0.03),
    "tokenizer": Target(open=_tokenizers, seeds=_tokenizer_seeds, tokens=JSON, weight=0.003),
    "discovered_tokenizer": Target(
        open=_discovered_tokenizers,
        seeds=_tokenizer_seeds,
        tokens=(*JSON, *_COMPONENTS),
        weight=0.003,
    ),
    "tokenizer_rules": Target(
        open=lambda: nullcontext(sanitize_tokenizer),
        seeds=lambda: [_tokenizer_seeds()[0][1:]],
        tokens=(*JSON, *_COMPONENTS),
        weight=0.05,
    ),
    "generation_config": Target(
        open=_generation_configs, seeds=_generation_seeds, tokens=JSON, weight=0.02
    ),
    "certificate": Target(
        open=_certificates,
        seeds=_certificate_seeds,
        tokens=_DER,
        refusals=(ValueError,),
        weight=0.5,
    ),
}
