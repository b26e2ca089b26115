"""A local fake of W&B's server: it accepts runs and reports, and stores what it receives."""

import gzip
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "a" * 40


class Server(ThreadingHTTPServer):
    """The server.

    Attributes:
        runs: data received for each run, by id: `lines` of its files, `config`, `groupName`, `exitcode` ...
        reports: data received for each saved report.
        asked: names of the GraphQL operations, in order.
        refuses: whether to reject every API key.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: dict[str, dict[str, Any]] = {}
        self.reports: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.projects = ["proof"]
        self.refuses = False
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error."""

    def history(self, run: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.runs[run]["lines"].get("wandb-history.jsonl", [])]

    def answer(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL operation."""
        project = {"id": "1", "internalId": "1", "name": given.get("project") or "proof"}
        project |= {"entity": {"id": "1", "name": "me"}, "entityName": "me"}
        if name == "UpsertBucket":
            run = self.runs.setdefault(given["name"], {"lines": {}})
            run |= {key: value for key, value in given.items() if value is not None}
            bucket = {"id": given["name"], "name": given["name"], "displayName": given.get("displayName") or "a name"}
            bucket |= {"description": "", "config": given.get("config"), "sweepName": None, "project": project}
            bucket |= {"historyLineCount": len(run["lines"].get("wandb-history.jsonl", []))}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if name == "RunResumeStatus":
            return {"model": project | {"bucket": self.resumed(given["name"])}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/put/{file}"} for file in given["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        if name == "upsertView":
            self.reports.append(given)
            view = {"id": "abc", "type": "runs", "name": given["name"], "displayName": given["displayName"]}
            view |= {"description": "", "project": project, "spec": given["spec"], "updatedAt": "2026-01-01T00:00:00"}
            return {"upsertView": {"view": view, "inserted": True}}
        if "rojects" in name:
            node = {"__typename": "Project", "id": "1", "entityName": "me", "createdAt": "2026-01-01T00:00:00"}
            edges = [{"node": node | {"name": each, "isBenchmark": False, "user": None}} for each in self.projects]
            page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
            return {"models": {"edges": edges, "pageInfo": page}}
        viewer = {"id": "1", "username": "me", "entity": "me", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": viewer, "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None, "features": []}}

    def resumed(self, name: str) -> dict[str, Any] | None:
        """Returns the state of a run that a client wants to resume, or None if there is none."""
        if name not in self.runs:
            return None
        run = self.runs[name]
        history, events = (run["lines"].get(f"wandb-{what}.jsonl", []) for what in ("history", "events"))
        bucket = {"id": name, "name": name, "displayName": "a name", "logLineCount": 0, "tags": run.get("tags")}
        bucket |= {"summaryMetrics": (run["lines"].get("wandb-summary.json") or ["{}"])[0]}
        bucket |= {"historyLineCount": len(history), "historyTail": json.dumps(history[-1:])}
        bucket |= {"eventsLineCount": len(events), "eventsTail": json.dumps(events[-1:])}
        return bucket | {"config": run.get("config") or "{}", "wandbConfig": '{"t": 1}'}


class Handler(BaseHTTPRequestHandler):
    """Its answers."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *words: Any) -> None:
        """Is silent."""

    def do_GET(self) -> None:
        self.reply({})

    def do_PUT(self) -> None:
        self.body()
        self.reply({})

    def do_POST(self) -> None:
        body = json.loads(self.body() or "{}")
        with self.server.lock:
            if self.server.refuses:
                self.reply({"errors": [{"message": "user is not logged in"}]}, 401)
            elif self.path == "/graphql":
                name = (re.search(r"(?:query|mutation)\s+(\w+)", body["query"]) or [None, "?"])[1]
                self.server.asked.append(name)
                self.reply({"data": self.server.answer(name, body.get("variables") or {})})
            elif self.path.endswith("/file_stream"):
                run = self.server.runs[self.path.split("/")[-2]]
                for file, chunk in (body.get("files") or {}).items():
                    run["lines"].setdefault(file, [])[chunk["offset"] :] = chunk["content"]
                run |= {key: body[key] for key in ("exitcode", "complete") if key in body}
                self.reply({"limits": {}})
            else:
                self.reply({})

    def body(self) -> bytes:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

    def reply(self, content: dict[str, Any], status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serving():
    """The server, while it runs."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
