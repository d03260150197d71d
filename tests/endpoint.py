"""An OpenAI-compatible endpoint on loopback that answers as a test wants it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Played = tuple[int, dict[str, str], Any]


def answer(content: str | None, finish: str = "stop") -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return {"id": "r1", "choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}


class Endpoint(ThreadingHTTPServer):
    """Plays its script of (status, headers, body), the last for ever, or what `respond` makes of a request's body.

    A body that is a number of seconds hangs, None cuts the connection. `asked` keeps the requests, `answered` the user
    messages whose answer went out whole.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Played] = [(200, {}, answer("hello"))]
        self.respond: Callable[[dict[str, Any]], Played] | None = None
        self.asked: list[dict[str, Any]] = []
        self.answered: list[str] = []
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append({"path": self.path, "key": self.headers["Authorization"], "body": body})
        script = self.server.script
        played = script[min(len(self.server.asked), len(script)) - 1]
        status, headers, reply = self.server.respond(body) if self.server.respond else played
        if reply is None:
            self.close_connection = True
            return
        if isinstance(reply, float):
            self.server.released.wait(reply)
            self.close_connection = True
            return
        data = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()
        self.server.answered.append(body["messages"][-1]["content"])

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that was killed
            super().handle()

    def finish(self) -> None:
        with suppress(ConnectionError):
            super().finish()

    def log_message(self, *_: object) -> None:
        pass
