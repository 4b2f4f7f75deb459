"""As much of the Hugging Face hub as downloading a model needs, on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves a folder as the repository `org/tiny` at one commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.token: str | None = None
        """Where set, every request must carry it."""
        self.downloads: Counter[str] = Counter()
        """Bytes sent by file."""
        self.spoiled: set[str] = set()
        """Files whose content differs from what the hub states."""

    def info(self) -> dict[str, Any]:
        siblings = []
        for path in sorted(each for each in self.folder.rglob("*") if each.is_file()):
            content = path.read_bytes()
            blob = b"blob %d\0" % len(content) + content
            entry: dict[str, Any] = {
                "rfilename": str(path.relative_to(self.folder)),
                "size": len(content),
                "blobId": hashlib.sha1(blob).hexdigest(),
            }
            if path.suffix == ".safetensors":
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        return {"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "siblings": siblings}

    def content(self, name: str) -> bytes:
        content = (self.folder / name).read_bytes()
        return content[:-1] + b"\xff" if name in self.spoiled else content


@contextmanager
def fake_hub(folder: Path) -> Iterator[FakeHub]:
    hub = FakeHub(folder)

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: FakeHub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        hub, path = self.served, self.path.partition("?")[0]
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._send(401, b"", {"X-Error-Code": "GatedRepo"}, body=body)
        elif path in ("/api/models/org/tiny", "/api/models/org/tiny/revision/main"):
            self._send(200, json.dumps(hub.info()).encode(), {}, body=body)
        elif path.startswith("/api/models/org/tiny/revision/"):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body=body)
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            self._file(unquote(path.partition(f"/{COMMIT}/")[2]), body=body)
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, body=body)

    def _file(self, name: str, *, body: bool) -> None:
        hub = self.served
        if not (hub.folder / name).is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body=body)
            return
        content, status = hub.content(name), 200
        headers = {
            "ETag": f'"{hashlib.sha256(name.encode()).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if wanted := self.headers.get("Range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            end = min(int(last or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
            content, status = content[int(first) : end], 206
        if body:
            hub.downloads[name] += len(content)
        self._send(status, content, headers, body=body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)
