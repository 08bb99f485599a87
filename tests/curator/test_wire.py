"""Messages arrive once, answers are given again to repeats, and every wait ends."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from curator import wire
from curator.wire import Client, Keys, Message, RemoteError, Request, Server, WireError, WireTimeout


@contextmanager
def serving(server: Server, answer: Callable[[Request], None]) -> Iterator[None]:
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            request = server.receive(0.05)
            if request is not None:
                answer(request)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        server.close()


def test_a_call_brings_fields_and_bodies_there_and_back() -> None:
    server = Server()
    seen: list[Request] = []

    def answer(request: Request) -> None:
        seen.append(request)
        server.reply(request, "done", {"n": 2}, (b"x", b"\0y"))

    with serving(server, answer):
        client = Client(server.address, name="a")
        reply = client.call("do", {"k": [1, None]}, (b"body",))
        client.close()
    assert (reply.kind, reply.fields, reply.body) == ("done", {"n": 2}, (b"x", b"\0y"))
    assert (seen[0].message.kind, seen[0].message.fields, seen[0].message.body) == ("do", {"k": [1, None]}, (b"body",))


def test_a_repeat_is_answered_again_and_handled_once() -> None:
    server = Server()
    handled = []

    def slow_once(request: Request) -> None:
        handled.append(request.message.id)
        time.sleep(0.3)
        server.reply(request, "done")

    with serving(server, slow_once):
        # Sent again every 0.1 s while the server sleeps: the repeats are found to be repeats.
        client = Client(server.address, name="a", resend_s=0.1)
        assert client.call("do").kind == "done"
        assert client.call("do").kind == "done"
        client.close()
    assert handled == ["1", "2"]


def test_a_repeat_of_what_is_not_remembered_is_handled_again() -> None:
    server = Server()
    handled: list[str] = []

    def answer(request: Request) -> None:
        handled.append(request.message.id)
        server.reply(request, "done", body=(b"large",), remember=False)

    with serving(server, answer):
        client = Client(server.address, name="a")
        assert client.call("do").body == (b"large",)
        client._socket.send_multipart(wire._encode(Message("do", id="1")))
        assert client.call("do").body == (b"large",)
        # The second answer to message 1 belongs to nothing and is dropped.
        assert client.poll(0.05) == []
        client.close()
    assert handled == ["1", "1", "2"]
    assert not server._answers


def test_what_stays_unanswered_is_sent_again_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[float] = []
    encode, now = wire._encode, [100.0]

    def noted(message: Message, credits: int = 0) -> list[bytes]:
        sent.append(now[0])
        return encode(message, credits)

    monkeypatch.setattr(wire, "_encode", noted)
    monkeypatch.setattr(wire.time, "monotonic", lambda: now[0])
    server = Server()
    client = Client(server.address, name="a", resend_s=2.0)
    client.post("insert", body=(b"large",))
    while now[0] < 146.0:
        now[0] += 0.5
        client.poll()
    client.close()
    server.close()
    # Pauses of 2, 4, 8 and then 10 s at most.
    assert sent == [100.0, 102.0, 106.0, 114.0, 124.0, 134.0, 144.0]


def test_a_message_sent_before_the_server_is_there_is_answered_once_it_is() -> None:
    first = Server()
    address = first.address
    first.close()
    client = Client(address, name="a", resend_s=0.2)
    client.post("do")
    assert client.poll(0.3) == []
    server = Server(address)
    with serving(server, lambda request: server.reply(request, "done")):
        deadline = time.monotonic() + 5
        answers = []
        while not answers and time.monotonic() < deadline:
            answers = client.poll(0.2)
        client.close()
    assert [answer.kind for answer in answers] == ["done"]


def test_credits_bound_what_is_unanswered() -> None:
    server = Server(credits=3)
    held: list[Request] = []

    def hold(request: Request) -> None:
        if request.message.kind == "hello":
            server.reply(request, "welcome")
        else:
            held.append(request)

    with serving(server, hold):
        client = Client(server.address, name="a", peer="buffer")
        assert client.credits == 1  # until the server says more
        client.call("hello")
        for _ in range(3):
            client.post("insert")
        assert not client.has_credit
        with pytest.raises(WireError, match="a: no credit left at buffer"):
            client.post("insert")
        client.close()


def test_answers_to_posts_survive_a_call() -> None:
    server = Server()
    with serving(server, lambda request: server.reply(request, request.message.kind)):
        client = Client(server.address, name="a")
        posted = client.post("first")
        assert client.call("second").kind == "second"
        assert [(m.id, m.kind) for m in client.poll(1.0)] == [(posted, "first")]
        client.close()


def test_a_refusal_and_a_silence_name_who_and_what() -> None:
    server = Server()

    def refuse_or_ignore(request: Request) -> None:
        if request.message.kind == "bad":
            server.refuse(request, "no such thing")

    with serving(server, refuse_or_ignore):
        client = Client(server.address, name="sampler-0", peer="buffer")
        with pytest.raises(RemoteError, match="buffer refused 'bad': no such thing"):
            client.call("bad")
        with pytest.raises(WireTimeout, match=r"sampler-0: buffer did not answer 'lease' within 0\.2 s"):
            client.call("lease", timeout_s=0.2)
        client.close()


def test_beyond_loopback_keys_are_required() -> None:
    with pytest.raises(ValueError, match="needs CURVE keys"):
        Server("tcp://0.0.0.0:*")
    keys = Keys.generate()
    server = Server("tcp://0.0.0.0:*", keys=keys)
    address = server.address.replace("0.0.0.0", "127.0.0.1")
    with serving(server, lambda request: server.reply(request, "done")):
        client = Client(address, name="a", keys=Keys.generate(server_public=keys.public))
        assert client.call("do").kind == "done"
        client.close()
        stranger = Client(address, name="b", keys=Keys.generate(server_public=Keys.generate().public))
        with pytest.raises(WireTimeout):
            stranger.call("do", timeout_s=0.5)
        stranger.close()


def knocks(address: str, keys: Keys | None) -> None:
    """A client that gets no answer."""
    client = Client(address, name="stranger", keys=keys)
    with pytest.raises(WireTimeout):
        client.call("do", timeout_s=0.3)
    client.close()


def test_who_has_no_key_that_the_server_knows_is_turned_away_and_counted() -> None:
    server_keys = Keys.generate()
    known = Keys.generate(server_public=server_keys.public)
    keys = replace(server_keys, clients=frozenset({known.public}))
    server = Server("tcp://0.0.0.0:*", keys=keys)
    address = server.address.replace("0.0.0.0", "127.0.0.1")
    seen: list[str] = []

    def answer(request: Request) -> None:
        seen.append(request.message.kind)
        server.reply(request, "done")

    with serving(server, answer):
        member = Client(address, name="member", keys=known)
        assert member.call("member").kind == "done"
        assert server.num_strangers == 0
        knocks(address, Keys.generate(server_public=server_keys.public))  # of another run's member
        first = server.num_strangers
        assert first >= 1  # it tries again by itself
        knocks(address, None)
        assert server.num_strangers > first
        assert member.call("member").kind == "done"
        member.close()
    assert seen == ["member", "member"]
    assert known.secret.decode() not in repr(known)


def test_whoever_only_receives_takes_what_is_told_of_strangers_so_that_none_can_fill_the_queue_of_it() -> None:
    keys = Keys.generate()
    server = Server("tcp://0.0.0.0:*", keys=keys)
    address = server.address.replace("0.0.0.0", "127.0.0.1")
    assert server._door is not None
    for _ in range(3):
        knocks(address, None)
        assert server._door._events.poll(1000)
        assert server.receive(0) is None
        assert not server._door._events.poll(0)
    assert server.refused["strangers"] >= 3
    server.close()


def test_an_oversized_message_is_refused_with_its_size_and_the_next_one_is_taken() -> None:
    server = Server(max_message_bytes=1000)
    with serving(server, lambda request: server.reply(request, "done")):
        client = Client(server.address, name="a")
        with pytest.raises(RemoteError, match=r"server refused 'do': 1\d\d\d bytes, .* has at most 1000"):
            client.call("do", body=(b"x" * 500, b"y" * 600))
        assert client.call("do", body=(b"x" * 500,)).kind == "done"
        client.close()
        # A frame that is announced as far larger is not even read.
        client = Client(server.address, name="b")
        with pytest.raises(WireTimeout):
            client.call("do", body=(b"x" * 5000,), timeout_s=0.3)
        client.close()
    assert server.num_oversized == 1


def test_a_taken_address_is_named() -> None:
    server = Server()
    with pytest.raises(WireError, match="Address already in use"):
        Server(server.address)
    server.close()


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"rubbish",
        b"[]",
        b'{"v": 1, "kind": "do", "id": ["a"], "credits": 0, "fields": {}}',
        b'{"v": 1, "kind": "do", "id": "a", "credits": Infinity, "fields": {}}',
        b'{"v": 1, "kind": "do", "id": "a", "credits": 0, "fields": []}',
        b'{"v": 9, "kind": "do", "id": "a", "credits": 0, "fields": {}}',
        b"[" * 100_000,
    ],
)
def test_rubbish_is_counted_and_harms_nobody(header: bytes) -> None:
    server = Server()
    with serving(server, lambda request: server.reply(request, "done")):
        client = Client(server.address, name="a")
        client._socket.send_multipart([header])
        assert client.call("do").kind == "done"
        client.close()
    assert server.num_refused == 1


def test_a_call_that_no_connection_takes_ends_by_its_deadline() -> None:
    with closing(Server()) as server, closing(Client(server.address, name="c", resend_s=0.05)) as client:
        # As libzmq does by itself where a handshake fails: a socket without a connection blocks whoever sends.
        client._socket.disconnect(server.address)
        with pytest.raises(WireTimeout, match="did not answer 'next'"):
            client.call("next", timeout_s=0.2)


def test_a_client_that_is_forgotten_in_a_cycle_is_collected() -> None:
    # Of five, as each alone may be collected socket first.
    for _ in range(5):
        client = Client("tcp://127.0.0.1:9", name="forgotten")
        client.itself = client  # type: ignore[attr-defined]
    del client
    collected = threading.Thread(target=gc.collect, daemon=True)
    collected.start()
    collected.join(10)
    assert not collected.is_alive()
