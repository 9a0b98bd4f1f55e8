"""A hub of models on the loopback interface, as far as the hub's own client asks: repositories, commits, files."""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator

import yaml

_REPO = r"/api/models/(?P<repo>[\w.-]+/[\w.-]+)"


class FakeHub(http.server.ThreadingHTTPServer):
    """`repos` holds the files of each repository, `asked` the requests so far, `created` what was said to make them."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        self.created: list[dict] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def serving() -> Iterator[FakeHub]:
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_HEAD(self):
        self._file(head=True)

    def do_GET(self):
        self.server.asked.append(f"GET {self.path}")
        if self.path == "/api/whoami-v2":
            return self._json({"name": "somebody"})
        if match := re.fullmatch(rf"{_REPO}(/revision/(?P<revision>[^/?]+))?(\?.*)?", self.path):
            return self._about(match["repo"], match["revision"] or "main")
        if match := re.fullmatch(rf"{_REPO}/tree/(?P<revision>[^/?]+).*", self.path):
            return self._tree(match["repo"])
        return self._file(head=False)

    def do_POST(self):
        self.server.asked.append(f"POST {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
            self.server.repos.setdefault(repo, {})
            self.server.created.append(asked)
            return self._json({"url": f"{self.server.url}/{repo}", "id": repo, "name": repo})
        if self.path == "/api/validate-yaml":
            head = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            return self._json({"errors": [] if "tags" in head else [{"message": "no tags"}], "warnings": []})
        match = re.match(rf"{_REPO}/(?P<what>preupload|commit)/main", self.path)
        if match is None or match["repo"] not in self.server.repos:
            return self._missing("RepoNotFound")
        if match["what"] == "preupload":
            asked = json.loads(body)["files"]
            return self._json(
                {"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]}
            )
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.repos[match["repo"]][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        commit = self._commit(match["repo"])
        return self._json(
            {"commitUrl": f"{self.server.url}/{match['repo']}/commit/{commit}", "commitOid": commit, "success": True}
        )

    def _about(self, repo: str, revision: str):
        if repo not in self.server.repos:
            return self._missing("RepoNotFound")
        if revision not in ("main", self._commit(repo)):
            return self._missing("RevisionNotFound")
        files = [{"rfilename": name} for name in self.server.repos[repo]]
        return self._json(
            {"id": repo, "modelId": repo, "sha": self._commit(repo), "siblings": files, "private": False, "tags": []}
        )

    def _tree(self, repo: str):
        return self._json(
            [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.server.repos[repo].items()
            ]
        )

    def _file(self, head: bool):
        match = re.fullmatch(r"/(?P<repo>[\w.-]+/[\w.-]+)/resolve/[^/]+/(?P<name>[^?]+)(\?.*)?", self.path)
        content = self.server.repos.get(match["repo"], {}).get(match["name"]) if match else None
        if match is None or content is None:
            return self._missing("EntryNotFound")
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", self._commit(match["repo"]))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if not head:
            self.wfile.write(content)

    def _commit(self, repo: str) -> str:
        return hashlib.sha1(repr(sorted(self.server.repos[repo].items())).encode()).hexdigest()

    def _json(self, value, status: int = 200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _missing(self, code: str):
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format, *args):
        del format, args
