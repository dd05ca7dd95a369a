"""A Hugging Face hub on loopback: models from folders, with the few requests that `huggingface_hub` makes to read them.
Connections can be cut in the middle of a file."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[2]
TOKEN = "hf_of_this_test"


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


@dataclass
class Repository:
    """A model: a folder for each of its revisions. A gated one gives files to `TOKEN` alone."""

    revisions: dict[str, Path]
    is_gated: bool = False

    def find(self, revision: str) -> tuple[str, Path] | None:
        """Commit and folder of a branch or commit."""
        named = {name: (commit_of(name), folder) for name, folder in self.revisions.items()}
        return named.get(revision) or {commit: (commit, folder) for commit, folder in named.values()}.get(revision)


@dataclass
class SmallHub:
    """The hub.

    Attributes:
        cuts: bytes of a file after which the connection is closed, once, by its name.
        holds: bytes of a file after which nothing more is sent until `released`, by its name.
        requests: method, path and range of each request.
    """

    models: dict[str, Repository]
    url: str = ""
    cuts: dict[str, int] = field(default_factory=dict)
    holds: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Environment of a client whose cache is in `home`."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}
        own |= {"XDG_CACHE_HOME": str(home / "cache"), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        return {**plain, **own, "OMP_NUM_THREADS": "1", **more}

    def run(self, home: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Runs `compress ...` or `runtime ...` in the folder `home`."""
        arguments = [sys.executable, "-m", f"{command[0]}.cli", *command[1:]]
        environment = self.environment(home, **more)
        return subprocess.run(arguments, cwd=home, env=environment, capture_output=True, text=True, timeout=300)

    def files(self, method: str = "GET") -> list[str]:
        """Names of the files that were asked for, in order."""
        paths = [path for how, path, _ in self.requests if how == method and "/resolve/" in path]
        return [path.partition("/resolve/")[2].partition("/")[2] for path in paths]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Server"

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, has_body: bool) -> None:
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range", "")))
        head, _, rest = path.removeprefix("/api/models").strip("/").partition("/resolve/")
        parts = head.split("/")
        repository = hub.models.get("/".join(parts[:2]))
        if repository is None:
            return self._refuse(401, "RepoNotFound")
        if rest:
            revision, _, name = rest.partition("/")
        else:
            revision, name = "/".join(parts[3:]) or "main", ""
        found = repository.find(revision)
        if found is None:
            return self._refuse(404, "RevisionNotFound")
        if not name:
            return self._list(parts, *found)
        if repository.is_gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, "GatedRepo")
        file = found[1] / name
        return self._send(file, found[0], has_body) if file.is_file() else self._refuse(404, "EntryNotFound")

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _list(self, parts: list[str], commit: str, folder: Path) -> None:
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        names = {str(file.relative_to(folder)): file.stat().st_size for file in files}
        if parts[2:3] == ["tree"]:
            answer: object = [
                {"type": "file", "path": name, "size": size, "oid": hashlib.sha1(name.encode()).hexdigest()}
                for name, size in names.items()
            ]
        else:
            siblings = [{"rfilename": name, "size": size} for name, size in names.items()]
            answer = {"id": "/".join(parts[:2]), "sha": commit, "siblings": siblings}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, file: Path, commit: str, has_body: bool) -> None:
        hub, data = self.server.hub, file.read_bytes()
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, data = int(first), data[: int(last) + 1] if last else data
        self.send_response(206 if start or last else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(data) - start))
        if start or last:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{file.stat().st_size}")
        self.end_headers()
        if not has_body:
            return
        if (end := hub.cuts.pop(file.name, None)) is not None:
            self.wfile.write(data[start:end])
            self.close_connection = True
            return
        if (end := hub.holds.pop(file.name, None)) is not None:
            self.wfile.write(data[start:end])
            hub.held.set()
            hub.released.wait(60)
            self.close_connection = True
            return
        self.wfile.write(data[start:])


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: SmallHub


@contextmanager
def serving_hub(models: dict[str, Repository]) -> Iterator[SmallHub]:
    """Serves models for the length of the block."""
    hub = SmallHub(models)
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.hub, hub.url = hub, f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.released.set()
            server.shutdown()
            thread.join()
