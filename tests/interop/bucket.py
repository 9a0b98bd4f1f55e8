"""A bucket on this machine: a folder behind the part of Google Cloud Storage's JSON interface that reading uses."""

import contextlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

Requests = list[tuple[str, str | None]]


@contextlib.contextmanager
def bucket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    """`gs://bucket/` is `folder` while this is entered; what comes back collects (object, Range) of every request."""
    requests: Requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urllib.parse.urlparse(self.path)
            _, _, name = url.path.partition("/o/")
            name = urllib.parse.unquote(name)
            requests.append((name, self.headers.get("Range")))
            if not name:
                query = urllib.parse.parse_qs(url.query)
                names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
                names = [name for name in names if name >= query.get("startOffset", [""])[0]]
                names = [name for name in names if name < query.get("endOffset", ["\U0010ffff"])[0]]
                body = {"kind": "storage#objects", "items": [self.described(name) for name in names]}
                self.answer(200, json.dumps(body).encode())
            elif not (folder / name).is_file():
                self.answer(404, b"")
            else:
                self.content((folder / name).read_bytes())

        def described(self, name: str) -> dict[str, str]:
            return {"name": name, "size": str((folder / name).stat().st_size), "generation": "1"}

        def content(self, whole: bytes) -> None:
            begin, end = 0, len(whole)
            if wanted := self.headers.get("Range"):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                begin = int(first) if first else len(whole) - int(last)
                end = min(int(last) + 1, len(whole)) if first and last else len(whole)
            place = f"bytes {begin}-{end - 1}/{len(whole)}"
            self.answer(206 if wanted else 200, whole[begin:end], **({"Content-Range": place} if wanted else {}))

        def answer(self, code: int, body: bytes, **headers: str) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(body)), "x-goog-generation": "1", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
        try:
            yield requests
        finally:
            server.shutdown()
            thread.join()
