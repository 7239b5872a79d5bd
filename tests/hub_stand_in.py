"""A stand-in for the hub on 127.0.0.1: one repository out of a folder, and what was asked of it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """repository: `org/name`; revisions: names that lead to COMMIT.

    gated: every request is refused as the hub refuses those without access.
    cut_after: the first download of each named file ends after so many bytes.
    """

    folder: Path
    repository: str = "org/tiny"
    revisions: tuple[str, ...] = ("main", COMMIT, "v2")
    gated: bool = False
    down: bool = False
    cut_after: dict[str, int] = field(default_factory=dict)
    cut_always: bool = False
    url: str = ""
    downloads: list[tuple[str, str]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    @property
    def fetched(self) -> list[str]:
        """Files whose contents were asked for, sorted."""
        return sorted({name for name, _ in self.downloads})


@contextmanager
def serve(folder: Path, **options: Any) -> Iterator[Hub]:
    """Run it while the block runs."""
    hub = Hub(folder, **options)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        if hub.down:
            self._send(503, b"down", {})
        elif hub.gated:
            self._refuse(403, "GatedRepo", "Access to this model is restricted")
        elif path.startswith(f"/api/models/{hub.repository}"):
            self._api(path.removeprefix(f"/api/models/{hub.repository}").strip("/"))
        elif path.startswith(f"/{hub.repository}/resolve/"):
            revision, _, name = path.removeprefix(f"/{hub.repository}/resolve/").partition("/")
            self._file(revision, name, body)
        else:
            self._refuse(404, "RepoNotFound", "Repository not found")

    def _api(self, rest: str) -> None:
        kind, _, revision = rest.partition("/")
        revision = revision.partition("/")[0] or "main"
        if revision not in self.hub.revisions:
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
            return
        files = sorted(p for p in self.hub.folder.rglob("*") if p.is_file())
        names = [p.relative_to(self.hub.folder).as_posix() for p in files]
        if kind == "tree":
            answer: Any = [
                {"type": "file", "path": n, "size": p.stat().st_size, "oid": _oid(p)}
                for n, p in zip(names, files, strict=True)
            ]
        else:
            answer = {
                "id": self.hub.repository, "sha": COMMIT, "private": False, "tags": [],
                "siblings": [{"rfilename": n} for n in names],
            }  # fmt: skip
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, revision: str, name: str, body: bool) -> None:
        hub = self.hub
        path = hub.folder / name
        if revision not in hub.revisions:
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
            return
        if not path.is_file():
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        data = path.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_oid(path)}"', "Accept-Ranges": "bytes"}
        span = self.headers.get("Range", "")
        if not body:
            self._send(200, data, headers, body=False)
            return
        hub.downloads.append((name, span))
        status, start = 200, 0
        if span:
            start = int(span.removeprefix("bytes=").partition("-")[0])
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = hub.cut_after.get(name) if hub.cut_always else hub.cut_after.pop(name, None)
        self._send(status, data[start:], headers, cut=cut)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str],
        *,
        body: bool = True,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            # The client waits for the rest, and the connection is gone.
            self.wfile.flush()
            self.close_connection = True


def _oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
