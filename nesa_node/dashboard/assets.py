"""Static files of the page, read once, with their HTTP caching and security headers."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "static"
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'self'",
    )
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    "": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    packed: bytes
    media_type: str
    tag: str

    def answer(self, request: Request) -> Response:
        """Response with the file, compressed if the browser accepts gzip; 304 if unchanged."""
        headers = {
            "etag": self.tag,
            # Revalidate each time, so that page and server have the same version.
            "cache-control": "no-cache",
            "vary": "accept-encoding",
            "content-security-policy": CONTENT_SECURITY_POLICY,
        }
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            return Response(self.packed, headers=headers, media_type=self.media_type)
        return Response(self.body, headers=headers, media_type=self.media_type)


def load_assets(folder: Path = FOLDER) -> dict[str, Asset]:
    """Load all static files, by their path below `folder`, with slashes."""
    assets = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in _TYPES:
            body = path.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
            packed = gzip.compress(body, 6, mtime=0)
            asset = Asset(body, packed, _TYPES[path.suffix], tag)
            assets[path.relative_to(folder).as_posix()] = asset
    return assets
