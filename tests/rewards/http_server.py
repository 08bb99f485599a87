"""A real HTTP server on the loopback, in threads, that answers as a test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """What the server answers: JSON, or bytes as they are, `after_s` the request came."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    after_s: float = 0.0


class Server(ThreadingHTTPServer):
    """Takes many connections at once, and says nothing of those that a client breaks off."""

    daemon_threads, request_queue_size = True, 128

    def handle_error(self, *_: Any) -> None:
        pass


class JudgeServer:
    """Answers every request by `answer(body)`; keeps bodies and headers, and counts how many are open at a time."""

    def __init__(self, answer: Callable[[Any], Reply]) -> None:
        self.bodies, self.headers = list[Any](), list[Mapping[str, str]]()
        self.num_open, self.most_open, self.stopped = 0, 0, threading.Event()
        self._answer, self._lock = answer, threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                owner._serve(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/chat/completions"

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        with self._lock:
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in handler.headers.items()})
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            reply = self._answer(body)
        self.stopped.wait(reply.after_s) if reply.after_s > 1 else time.sleep(reply.after_s)
        with self._lock:
            self.num_open -= 1
        data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        try:
            handler.send_response(reply.status)
            for name, value in {"content-length": str(len(data)), **reply.headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(data)
        except OSError:  # nobody waits any longer
            handler.close_connection = True

    def __enter__(self) -> JudgeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()


def says(text: str | None, **more: Any) -> Reply:
    """A chat completion."""
    return Reply({"choices": [{"message": {"role": "assistant", "content": text}}]}, **more)


def in_turn(*replies: Reply) -> Callable[[Any], Reply]:
    """One reply after the other, the last one for good."""
    left = list(replies)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]
