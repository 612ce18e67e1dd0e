"""A small hub on loopback: repositories of models and data sets in memory, with what the hub's client asks of one."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

WRITER, READER = "hf_writer", "hf_reader"
"""Tokens: one may do everything, the other may read what is private too."""

LARGE = 20_000
"""Files of that many bytes go the way of large ones."""


def _sha(*parts):
    return hashlib.sha1(b"\0".join(parts)).hexdigest()


@dataclass
class Repository:
    """Commits and branches.

    Attributes:
        private: Seen by those with a token only.
        commits: Hash -> files.
        branches: Name -> hash.
        messages: Of the commits, in order.
    """

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files, branch="main", message=""):
        parent = self.branches.get(branch, self.branches.get("main", ""))
        sha = _sha(parent.encode(), message.encode(), *(k.encode() + v for k, v in sorted(files.items())))
        self.commits[sha], self.branches[branch] = files, sha
        self.messages.append(message)
        return sha

    def files(self, revision="main"):
        return self.commits[self.branches.get(revision, revision)]

    def resolve(self, revision):
        sha = self.branches.get(revision, revision)
        return sha if sha in self.commits else None


class FakeHub:
    """The server's state, and what it was asked.

    Attributes:
        repositories: ``owner/name``, of data sets ``datasets/owner/name``.
        asked: Method and path of every request, in order.
        failing: Part of a path -> status that it is answered with.
        lfs: Large files by their hash.
    """

    def __init__(self):
        self.repositories = {}
        self.asked = []
        self.failing = {}
        self.lfs = {}
        self.url = ""

    def add(self, name, source, private=False, branch="main"):
        """Fill a repository by hand; returns the commit."""
        files = source
        if isinstance(source, Path):
            files = {str(p.relative_to(source)): p.read_bytes() for p in sorted(source.rglob("*")) if p.is_file()}
        repository = self.repositories.setdefault(name, Repository(private))
        return repository.commit({".gitattributes": b"", **files}, branch)

    def count(self, part):
        """Requests whose path holds a text."""
        return sum(part in path for _, path in self.asked)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_):
        pass

    # ------------------------------------------------------------------ answers

    def answer(self, body=None, status=200, headers=None):
        data = body if isinstance(body, bytes) else json.dumps(body if body is not None else {}).encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status, code, headers=None):
        self.answer({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

    @property
    def token(self):
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def seen(self, name):
        """A repository that the sender may see; answers otherwise."""
        found = self.hub.repositories.get(name)
        if found is None:
            self.refuse(404 if self.token else 401, "RepoNotFound")
        elif found.private and self.token not in (WRITER, READER):
            self.refuse(401, "RepoNotFound")
            return None
        return found

    # ----------------------------------------------------------------- requests

    def handle_any(self):
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.asked.append((self.command, path))
        body = self.body()
        for part, status in self.hub.failing.items():
            if part in path:
                self.answer({"error": "out of order"}, status)
                return
        if self.command in ("POST", "PUT"):
            self.write(path, body)
        else:
            self.read(path)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def read(self, path):
        if not path:
            self.answer()
        elif "/resolve/" in path:
            name, _, rest = path.partition("/resolve/")
            revision, _, file = rest.partition("/")
            self.file(name, revision, file)
        elif path.startswith("api/") and path.count("/") > 2:
            _, kind, owner, short, *rest = path.split("/")
            name = f"{owner}/{short}" if kind == "models" else f"{kind}/{owner}/{short}"
            if (repository := self.seen(name)) is not None:
                self.describe(f"{owner}/{short}", repository, rest)
        else:
            self.refuse(404, "EntryNotFound")

    def file(self, name, revision, file):
        repository = self.seen(name)
        if repository is None:
            return
        sha = repository.resolve(revision)
        if sha is None:
            self.refuse(404, "RevisionNotFound")
            return
        data = repository.commits[sha].get(file)
        if data is None:
            self.refuse(404, "EntryNotFound", {"X-Repo-Commit": sha})
            return
        self.answer(data, 200, {"X-Repo-Commit": sha, "ETag": f'"{_sha(data)}"', "Accept-Ranges": "bytes"})

    def describe(self, name, repository, rest):
        what = rest[0] if rest else "revision"
        if what == "refs":
            branches = [
                {"name": b, "ref": f"refs/heads/{b}", "targetCommit": c} for b, c in repository.branches.items()
            ]
            self.answer({"branches": branches, "tags": [], "converts": []})
            return
        sha = repository.resolve(rest[1] if len(rest) > 1 else "main")
        if sha is None:
            self.refuse(404, "RevisionNotFound")
            return
        files = repository.commits[sha]
        if what == "tree":
            rows = [{"type": "file", "path": p, "size": len(d), "oid": _sha(d)} for p, d in files.items()]
            self.answer(rows)
        else:
            siblings = [{"rfilename": p} for p in files]
            self.answer({"id": name, "sha": sha, "private": repository.private, "siblings": siblings})

    def write(self, path, body):
        if path == "api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif path.startswith("lfs/"):
            self.hub.lfs[path.removeprefix("lfs/")] = body
            self.answer()
        elif self.token != WRITER:
            self.refuse(401 if not self.token else 403, "Forbidden")
        elif path == "api/repos/create":
            self.create(json.loads(body))
        elif path.endswith(".git/info/lfs/objects/batch"):
            actions = [
                {**o, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": actions})
        else:
            _, _, owner, short, verb, branch = path.split("/")
            if (repository := self.seen(f"{owner}/{short}")) is not None:
                self.change(f"{owner}/{short}", repository, verb, branch, body)

    def create(self, asked):
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repositories:
            self.refuse(409, "Conflict")
            return
        self.hub.repositories[name] = Repository(asked.get("visibility") == "private")
        self.hub.repositories[name].commit({".gitattributes": b""})
        self.answer({"url": f"{self.hub.url}/{name}"})

    def change(self, name, repository, verb, branch, body):
        if verb == "branch":
            repository.branches[branch] = repository.branches["main"]
            self.answer()
        elif verb == "preupload":
            rows = [
                {"path": f["path"], "uploadMode": "lfs" if f["size"] >= LARGE else "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            self.answer({"files": rows})
        else:
            files, message = dict(repository.files(branch)), ""
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    message = value["summary"]
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.hub.lfs[value["oid"]]
                else:
                    del files[value["path"]]
            sha = repository.commit(files, branch, message)
            self.answer({"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha, "pullRequestUrl": None})


@contextmanager
def serving():
    """A hub that answers while the block lasts."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    # As often it looks whether it is to end.
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
