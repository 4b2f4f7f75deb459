"""A client that reads one completion as it comes, over a plain socket."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

from benchmarks.figures import gaps

TIMEOUT_S = 600.0
"""Waiting for room is no failure."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """What came; times are `time.perf_counter()`."""

    text: str
    started: float
    chunk_times: tuple[float, ...]
    finish_reason: str | None
    """None where the stream ended without one."""

    @property
    def gaps_s(self) -> list[float]:
        return gaps(self.chunk_times)


def request_body(model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """A greedy stream of exactly so many tokens, unless the model ends before."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }


def stream(
    port: int,
    body: dict[str, Any],
) -> Streamed:
    """POST `body` and read until it ends.

    Raises `ConnectionError` for anything but a stream, and for one that breaks off with an error.
    """
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        started = time.perf_counter()
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ConnectionError(f"{response.status}: {response.read(500).decode()}")
        texts: list[str] = []
        times: list[float] = []
        reason = None
        while line := response.readline():
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ConnectionError(str(event["error"]))
            for choice in event["choices"]:
                if choice["text"]:
                    texts.append(choice["text"])
                    times.append(time.perf_counter())
                reason = choice["finish_reason"] or reason
        return Streamed("".join(texts), started, tuple(times), reason)
    finally:
        connection.close()


def stream_until(
    port: int, body: dict[str, Any], gone: threading.Event, first: threading.Semaphore
) -> None:
    """Begin a stream, release `first` once something comes, and vanish once `gone` is set."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    came = False
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head.encode() + content)
        connection.settimeout(0.1)
        while not gone.is_set():
            try:
                data = connection.recv(65536)
            except TimeoutError:
                continue
            if not data:
                raise ConnectionError("the gateway ended the stream")
            if b"data: " in data and not came:
                came = True
                first.release()
