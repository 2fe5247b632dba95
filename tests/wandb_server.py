"""A stand-in for wandb's server: keeps the history of runs as the real one does, by line number.

It answers what wandb's own client asks of it while a run is logged, resumed and synced: GraphQL
for the run, and the file stream, whose every piece says at which line it begins.
"""

import gzip
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Runs:
    """Run id -> the lines of its files, such as wandb-history.jsonl, and its config."""

    def __init__(self):
        self.files, self.configs, self.lock = {}, {}, threading.Lock()

    def history(self, identity: str) -> list[dict]:
        with self.lock:
            return [json.loads(line) for line in self.lines(identity, "wandb-history.jsonl")]

    def lines(self, identity: str, name: str) -> list[str]:
        return self.files.get(identity, {}).get(name, [])

    def take(self, identity: str, pieces: dict) -> None:
        """Lines beginning at an offset: they replace those that are there."""
        with self.lock:
            for name, piece in pieces.items():
                lines = self.files.setdefault(identity, {}).setdefault(name, [])
                first, new = piece["offset"], piece["content"]
                assert first <= len(lines) or not name.endswith("history.jsonl"), "a hole"
                lines[first : first + len(new)] = new

    def answer(self, name: str, variables: dict) -> dict:
        if name == "Viewer":
            return {"viewer": {"id": "me", "entity": "me", "username": "me", "teams": None}}
        if name == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        if name == "RunResumeStatus":
            return {"model": PROJECT | {"bucket": self.bucket(variables["name"])}}
        if name == "UpsertBucket":
            identity = variables.get("name") or variables["id"]
            inserted = identity not in self.configs
            if variables.get("config") or inserted:
                self.configs[identity] = variables.get("config") or "{}"
            bucket = self.bucket(identity)
            return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}
        if name == "CreateRunFiles":
            return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": []}}
        return {}

    def bucket(self, identity: str) -> dict | None:
        """What the server says of a run; None if it knows none of this id."""
        if identity not in self.configs:
            return None
        history, events = (self.lines(identity, f"wandb-{x}.jsonl") for x in ("history", "events"))
        summary = self.lines(identity, "wandb-summary.json")
        return {
            "id": identity, "name": identity, "displayName": identity, "project": PROJECT,
            "config": self.configs[identity], "wandbConfig": json.dumps({"t": 1}), "tags": [],
            "historyLineCount": len(history), "eventsLineCount": len(events), "logLineCount": 0,
            "historyTail": json.dumps(history[-1:]), "eventsTail": json.dumps(events[-1:]),
            "summaryMetrics": summary[-1] if summary else "{}",
        }  # fmt: skip


GZIP = b"\x1f\x8b"
PROJECT = {"id": "p", "name": "p", "entity": {"id": "me", "name": "me"}}


@contextmanager
def wandb_server():
    """Gives what it keeps, a Runs, and the environment that sends wandb to it."""
    runs = Runs()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if body[:2] == GZIP:
                body = gzip.decompress(body)
            answer = {}
            if self.path == "/graphql":
                asked = json.loads(body)
                answer = {"data": runs.answer(asked["operationName"], asked.get("variables") or {})}
            elif self.path.endswith("/file_stream"):
                asked = json.loads(body)
                runs.take(self.path.split("/")[-2], asked.get("files", {}))
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield runs, {"WANDB_BASE_URL": url, "WANDB_API_KEY": "k" * 40, "WANDB_MODE": "online"}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
