"""Messages over ZeroMQ: framing, credits, acknowledgements, keys. The only file that imports zmq.

One `Server` (ROUTER) answers many `Client`s (DEALER). Every message has an id; every message is answered; a client
sends an unanswered one again, and a server answers a repeat with the answer it gave, so that neither a lost frame nor
a restarted server loses or doubles anything. An answer that is large and that the application can give again, the
server need not remember: a repeat is then asked anew. A client may have as many unanswered messages as the server
granted it credits: ZeroMQ's own high-water mark is no exact bound.

A server bound to anything but loopback needs CURVE keys. It takes the clients whose public keys it knows, where it is
told which; who else comes is turned away before a byte of a message is read, and counted.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

PROTOCOL = 1
ERROR = "error"
MAX_RESEND_S = 10.0
"""An unanswered message is sent again at least this often."""
_STRANGERS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
"""Another key, none, or not ZeroMQ's protocol after its greeting."""


class WireError(Exception):
    """Base of what goes wrong on the wire."""


class WireTimeout(WireError):
    """No answer within the deadline; the message names who was asked for what."""


class RemoteError(WireError):
    """The server answered that it refuses; the message is its reason."""


@dataclass(frozen=True, slots=True)
class Message:
    """What is asked or answered: a kind, small plain fields, and bodies of bytes (Arrow IPC)."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    body: tuple[bytes, ...] = ()
    id: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """A message and who sent it; handed back to `Server.reply`."""

    sender: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class Keys:
    """CURVE keys in Z85. A server has its pair; a client has its pair and the server's public key."""

    public: bytes
    secret: bytes = field(repr=False)
    server_public: bytes | None = None
    clients: frozenset[bytes] | None = None
    """Of a server: the public keys of the clients it takes. None: of whoever knows the server's public key."""

    @staticmethod
    def generate(server_public: bytes | None = None) -> Keys:
        """A new pair."""
        public, secret = zmq.curve_keypair()
        return Keys(public, secret, server_public)


def _encode(message: Message, credits: int = 0) -> list[bytes]:
    header = {"v": PROTOCOL, "kind": message.kind, "id": message.id, "credits": credits, "fields": dict(message.fields)}
    return [json.dumps(header).encode(), *message.body]


def _decode(frames: Sequence[bytes]) -> tuple[Message, int]:
    try:
        header = json.loads(frames[0])
        found = tuple(type(header[name]) for name in ("v", "kind", "id", "credits", "fields"))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise WireError(f"not a message: {error!r}") from error
    if found != (int, str, str, int, dict) or header["v"] != PROTOCOL:
        raise WireError(f"not a message of protocol {PROTOCOL}: version {header['v']!r}, fields of types {found}")
    return Message(header["kind"], header["fields"], tuple(frames[1:]), header["id"]), header["credits"]


def _is_loopback(address: str) -> bool:
    host = address.removeprefix("tcp://").rpartition(":")[0]
    return address.startswith(("ipc://", "inproc://")) or host in ("localhost", "[::1]") or host.startswith("127.")


class Server:
    """Receives requests and answers them, at once or later, in any order."""

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:*",
        *,
        credits: int = 64,
        keys: Keys | None = None,
        max_message_bytes: int = 256 << 20,
        remembered: int = 1024,
    ) -> None:
        """Bind. `credits`: unanswered messages per client; `remembered`: answers kept for repeats.

        A message of more than `max_message_bytes` in all is refused; one with a frame of more than twice as many closes
        the connection it comes by before that frame is read.

        Raises ValueError for an address beyond loopback without keys, WireError where the address is taken.
        """
        if keys is None and not _is_loopback(bind):
            raise ValueError(f"{bind}: beyond loopback a server needs CURVE keys")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * max_message_bytes)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
        self._door = None if keys is None else _Door(self._context, self._socket, keys.clients)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            if self._door:
                self._door.close()
            self._context.destroy(linger=0)
            raise WireError(f"{bind}: {error.strerror}") from error
        self._credits, self._max_message_bytes = credits, max_message_bytes
        self._remembered = remembered
        # None marks a request that was received and is not answered yet.
        self._answers: OrderedDict[tuple[bytes, str], list[bytes] | None] = OrderedDict()
        self.num_refused = 0
        """Messages that were malformed."""
        self.num_oversized = 0
        """Messages that were larger than `max_message_bytes`."""

    @property
    def num_strangers(self) -> int:
        """Connections that were turned away before the last `receive`: without a key, or with one that is not known."""
        return self._door.num_strangers if self._door else 0

    @property
    def refused(self) -> dict[str, int]:
        """What never reached anybody, counted by why."""
        return {
            "malformed": self.num_refused,
            "oversized": self.num_oversized,
            "strangers": self.num_strangers,
        }

    @property
    def address(self) -> str:
        """Where clients connect, the chosen port included."""
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.decode().rstrip("\0")

    def receive(self, timeout_s: float) -> Request | None:
        """The next new request, or None when none arrived in time. Repeats and rubbish are dealt with inside."""
        deadline = time.monotonic() + timeout_s
        if self._door:
            self._door.count()
        while True:
            left_ms = max(0, int((deadline - time.monotonic()) * 1000))
            if not self._socket.poll(left_ms, zmq.POLLIN):
                return None
            sender, *frames = self._socket.recv_multipart()
            try:
                message, _ = _decode(frames)
            except WireError:
                self.num_refused += 1
                continue
            if (size := sum(map(len, frames))) > self._max_message_bytes:
                self.num_oversized += 1
                self._refuse_oversized(Request(sender, message), size)
                continue
            key = (sender, message.id)
            if key in self._answers:
                answer = self._answers[key]
                if answer is not None:
                    self._socket.send_multipart([sender, *answer])
                continue
            self._answers[key] = None
            self._forget()
            return Request(sender, message)

    def reply(
        self,
        request: Request,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        body: Sequence[bytes] = (),
        *,
        remember: bool = True,
    ) -> None:
        """Answer a request.

        The answer is kept for repeats, or not: then `receive` gives a repeat as a new request, which must do no harm.
        """
        answer = _encode(Message(kind, fields or {}, tuple(body), request.message.id), self._credits)
        key = (request.sender, request.message.id)
        if remember:
            self._answers[key] = answer
        else:
            self._answers.pop(key, None)
        self._socket.send_multipart([request.sender, *answer])

    def refuse(self, request: Request, reason: str) -> None:
        """Answer that the request is refused; the client's call raises RemoteError with the reason."""
        self.reply(request, ERROR, {"reason": reason})

    def _refuse_oversized(self, request: Request, size: int) -> None:
        reason = f"{size} bytes, and a message has at most {self._max_message_bytes}"
        # Not remembered: a repeat is measured again.
        self.reply(request, ERROR, {"reason": reason}, remember=False)

    def _forget(self) -> None:
        while len(self._answers) > self._remembered:
            oldest = next((key for key, answer in self._answers.items() if answer is not None), None)
            if oldest is None:
                return
            del self._answers[oldest]

    def close(self) -> None:
        """Close after what was sent is handed to the network."""
        if self._door:
            self._door.close()
        self._socket.close()
        self._context.term()


class _Door:
    """Who may come in to a server with keys, and how many were turned away."""

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[Any], clients: frozenset[bytes] | None) -> None:
        self._clients, self._socket = clients, socket
        self.num_strangers = 0
        """Counted by `count`."""
        self._guard: ThreadAuthenticator | None = None
        if clients is not None:
            self._guard = ThreadAuthenticator(context)
            self._guard.start()
            self._guard.configure_curve_callback("*", self)
        self._events = socket.get_monitor_socket(_STRANGERS)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client's public key is known; asked by the guard's thread."""
        return self._clients is not None and key in self._clients

    def count(self) -> None:
        """Take what has been told of strangers: where nobody does, ZeroMQ waits with the next, and with all else."""
        while self._events.poll(0):
            recv_monitor_message(self._events)
            self.num_strangers += 1

    def close(self) -> None:
        """Before the socket is closed."""
        self._socket.disable_monitor()
        self._events.close(linger=0)
        if self._guard:
            self._guard.stop()


@dataclass(slots=True)
class _Unanswered:
    message: Message
    again_at: float
    pause_s: float


class Client:
    """Asks one server. Not for several threads."""

    def __init__(
        self, address: str, *, name: str, peer: str = "server", keys: Keys | None = None, resend_s: float = 2.0
    ) -> None:
        """Connect. `name` and `peer` appear in errors.

        An unanswered message is sent again after `resend_s`, then after twice that, and so on, at most MAX_RESEND_S: a
        server that withholds an answer by design is not flooded with bodies. A server that restarts has every message
        younger than `resend_s` within `resend_s`, and all others within MAX_RESEND_S.
        """
        # The process's own context: one that is collected in a cycle with its socket waits for that socket for ever.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.IDENTITY, f"{name}/{uuid.uuid4().hex[:12]}".encode())
        if keys is not None:
            if keys.server_public is None:
                raise ValueError("a client's keys need the server's public key")
            self._socket.curve_serverkey = keys.server_public
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
        self._socket.connect(address)
        self._name, self._peer, self._resend_s = name, peer, resend_s
        self._unanswered: OrderedDict[str, _Unanswered] = OrderedDict()
        self._arrived: OrderedDict[str, Message] = OrderedDict()
        self._num_sent = 0
        self.credits = 1
        """Messages that may be unanswered at once; the server's first answer raises it."""

    @property
    def num_unanswered(self) -> int:
        """Messages on their way."""
        return len(self._unanswered)

    @property
    def has_credit(self) -> bool:
        """Whether `post` may be called."""
        return len(self._unanswered) < self.credits

    def post(self, kind: str, fields: Mapping[str, Any] | None = None, body: Sequence[bytes] = ()) -> str:
        """Send without waiting; the answer comes from `poll` under the returned id.

        Raises WireError where there is no credit: the caller keeps the message and polls.
        """
        if not self.has_credit:
            raise WireError(f"{self._name}: no credit left at {self._peer} ({self.credits} unanswered)")
        return self._send(kind, fields, body)

    def _send(self, kind: str, fields: Mapping[str, Any] | None, body: Sequence[bytes]) -> str:
        self._num_sent += 1
        message = Message(kind, fields or {}, tuple(body), str(self._num_sent))
        self._unanswered[message.id] = _Unanswered(message, time.monotonic() + self._resend_s, self._resend_s)
        self._give(message)
        return message.id

    def _give(self, message: Message) -> None:
        # Where no connection takes it, as after a handshake that failed, it is sent again as one without an answer is.
        with suppress(zmq.Again):
            self._socket.send_multipart(_encode(message), zmq.NOBLOCK)

    def poll(self, timeout_s: float = 0.0) -> list[Message]:
        """Answers that arrived, waiting up to `timeout_s` for the first. Unanswered messages are sent again."""
        self._receive(timeout_s)
        arrived = list(self._arrived.values())
        self._arrived.clear()
        return arrived

    def call(
        self, kind: str, fields: Mapping[str, Any] | None = None, body: Sequence[bytes] = (), timeout_s: float = 30.0
    ) -> Message:
        """Send and wait for the answer; answers to posted messages stay for `poll`.

        Raises WireTimeout naming who was asked for what, RemoteError with the server's reason.
        """
        # A call is one at a time by nature, so it may go beyond the credits of posted messages.
        message_id = self._send(kind, fields, body)
        deadline = time.monotonic() + timeout_s
        while message_id not in self._arrived:
            left = deadline - time.monotonic()
            if left <= 0:
                self._unanswered.pop(message_id, None)
                raise WireTimeout(f"{self._name}: {self._peer} did not answer '{kind}' within {timeout_s:g} s")
            self._receive(min(left, self._resend_s))
        answer = self._arrived.pop(message_id)
        if answer.kind == ERROR:
            raise RemoteError(f"{self._peer} refused '{kind}': {answer.fields['reason']}")
        return answer

    def _receive(self, timeout_s: float) -> None:
        wait_ms = int(timeout_s * 1000)
        while self._socket.poll(wait_ms, zmq.POLLIN):
            message, credits = _decode(self._socket.recv_multipart())
            # An answer to a message given up, or a second answer, is harmless.
            if self._unanswered.pop(message.id, None) is not None:
                self._arrived[message.id] = message
                self.credits = credits
            wait_ms = 0
        now = time.monotonic()
        for waiting in self._unanswered.values():
            if now >= waiting.again_at:
                waiting.pause_s = min(2 * waiting.pause_s, MAX_RESEND_S)
                waiting.again_at = now + waiting.pause_s
                self._give(waiting.message)

    def close(self) -> None:
        """Close at once; unanswered messages are the caller's to send again."""
        self._socket.close()
