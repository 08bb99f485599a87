"""An endpoint that is slow, refuses, breaks or lies; and what is asked of it meanwhile."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from typing import Any

import pytest

from stream_grpo.config_http import ScoreModel
from stream_grpo.errors import ConfigError
from stream_grpo.rewards.http_client import EndpointClient, retry_after_s
from stream_grpo.rewards.judging import EndpointError
from tests.rewards.http_server import JudgeServer, Reply, in_turn

FINE = Reply({"score": 0.5})


def settings(url: str, **more: Any) -> ScoreModel:
    return ScoreModel(kind="score", url=url, **{"backoff_s": 0.01, "timeout_s": 5.0, "total_s": 5.0, **more})


def using(url: str, act: Callable[[EndpointClient], Awaitable[Any]], **more: Any) -> Any:
    """What `act` makes of a client of this endpoint."""

    async def run() -> Any:
        client = EndpointClient(settings(url, **more), jitter=lambda: 1.0)
        try:
            return await act(client)
        finally:
            await client.close()

    return asyncio.run(run())


def posted(url: str, **more: Any) -> Any:
    return using(url, lambda client: client.post({"prompt": "1+1="}), **more)


def test_a_reply_is_its_json_object() -> None:
    with JudgeServer(in_turn(FINE)) as server:
        assert posted(server.url) == {"score": 0.5}
    assert server.bodies == [{"prompt": "1+1="}]
    assert "authorization" not in server.headers[0]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_may_pass_is_tried_again(status: int) -> None:
    with JudgeServer(in_turn(Reply({}, status), Reply({}, status), FINE)) as server:
        assert posted(server.url, max_retries=2) == {"score": 0.5}
    assert len(server.bodies) == 3


def test_what_does_not_pass_is_an_error_with_status_and_body() -> None:
    with (
        JudgeServer(in_turn(Reply({"error": "overloaded"}, 503))) as server,
        pytest.raises(EndpointError, match=r"status 503: .*overloaded.*, after 3 attempts"),
    ):
        posted(server.url, max_retries=2)
    assert len(server.bodies) == 3


def test_a_request_that_is_wrong_is_asked_once() -> None:
    with (
        JudgeServer(in_turn(Reply({"error": "no such model"}, 404))) as server,
        pytest.raises(EndpointError, match=r"status 404: .*no such model"),
    ):
        posted(server.url)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html>oops", "the reply is not JSON: '<html>oops'"),
        (b"\xff\xfe\x00", "the reply is not JSON"),
        (b"[" * 100_000, "the reply is not JSON"),
        ([1], "the reply is no JSON object"),
        (b'"' + b"x" * (5 << 20) + b'"', "a reply of more than 4194304 bytes"),
    ],
)
def test_a_reply_that_is_none_is_an_error(body: Any, reason: str) -> None:
    with JudgeServer(in_turn(Reply(body))) as server, pytest.raises(EndpointError, match=reason):
        posted(server.url)


def test_a_refused_connection_is_tried_again_and_then_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
    with pytest.raises(EndpointError, match=r"ConnectError: .*, after 3 attempts"):
        posted(url, max_retries=2)


def test_a_reply_that_takes_too_long_is_given_up_and_tried_again() -> None:
    with JudgeServer(in_turn(Reply(FINE.body, after_s=30.0), FINE)) as server:
        assert posted(server.url, timeout_s=0.1) == {"score": 0.5}
    with (
        JudgeServer(in_turn(Reply(FINE.body, after_s=30.0))) as server,
        pytest.raises(EndpointError, match=r"no whole reply within 0.1 s, after 2 attempts"),
    ):
        posted(server.url, timeout_s=0.1, max_retries=1)


def test_no_attempt_begins_that_the_time_of_the_request_does_not_cover() -> None:
    with (
        JudgeServer(in_turn(Reply({}, 500))) as server,
        pytest.raises(EndpointError, match="after 1 attempt"),
    ):
        # The jitter of the tests is 1: the first wait is the whole backoff, longer than the time.
        posted(server.url, backoff_s=10.0, total_s=1.0)
    assert len(server.bodies) == 1


def test_retry_after_holds_back_every_request_of_the_endpoint() -> None:
    came: list[float] = []

    def answer(body: Any) -> Reply:
        came.append(time.monotonic())
        return Reply({}, 429, {"retry-after": "0.4"}) if len(came) == 1 else FINE

    async def first_and_second(client: EndpointClient) -> None:
        first = asyncio.create_task(client.post({}))
        while not came:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        await asyncio.gather(first, client.post({}))

    with JudgeServer(answer) as server:
        using(server.url, first_and_second, backoff_s=0.001)
    assert len(came) == 3
    # The server noted the time before it answered, so that 0.4 s is the least.
    assert min(later - came[0] for later in came[1:]) >= 0.4


def test_a_server_that_asks_for_too_long_a_wait_is_given_up_at_once() -> None:
    with (
        JudgeServer(in_turn(Reply({}, 429, {"retry-after": "3600"}))) as server,
        pytest.raises(EndpointError, match="status 429"),
    ):
        posted(server.url)
    assert len(server.bodies) == 1


def test_never_more_requests_at_a_time_than_there_are_places() -> None:
    async def twenty(client: EndpointClient) -> int:
        tasks = [asyncio.create_task(client.post({})) for _ in range(20)]
        await asyncio.sleep(0)
        num_waiting = client.num_waiting + client.num_running
        await asyncio.gather(*tasks)
        assert (client.num_waiting, client.num_running) == (0, 0)
        return num_waiting

    with JudgeServer(in_turn(Reply(FINE.body, after_s=0.02))) as server:
        assert using(server.url, twenty, max_concurrent=3) == 20
    assert server.most_open == 3
    assert len(server.bodies) == 20


def test_a_key_is_sent_and_never_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    with JudgeServer(in_turn(Reply({"error": "bad key sk-secret"}, 401))) as server:
        with pytest.raises(EndpointError, match=r"bad key \*\*\*") as caught:
            posted(server.url, api_key_env="JUDGE_KEY")
        assert server.headers[0]["authorization"] == "Bearer sk-secret"
    # Not a part of it either, where the error is cut: 200 characters end within the key.
    with (
        JudgeServer(in_turn(Reply({"error": "x" * 180 + "sk-secret"}, 401))) as server,
        pytest.raises(EndpointError, match=r"x\*\*\*"),
    ):
        posted(server.url, api_key_env="JUDGE_KEY")
    shown = f"{caught.value} {caught.value.__cause__} {settings(server.url, api_key_env='JUDGE_KEY')!r}"
    assert "sk-secret" not in shown


def test_a_key_that_is_not_there_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="api_key_env = 'NO_SUCH_KEY': this environment variable is not set"):
        EndpointClient(settings("http://127.0.0.1:1/", api_key_env="NO_SUCH_KEY"))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("3", 3.0), ("0.5", 0.5), (formatdate(1060, usegmt=True), 60.0), (formatdate(10, usegmt=True), 0.0)],
)
def test_retry_after_is_seconds_or_a_date(value: str, seconds: float) -> None:
    assert retry_after_s(value, 1000.0) == seconds


@pytest.mark.parametrize("value", ["", "soon", "-1", "nan", "inf", "9" * 500])
def test_a_retry_after_that_is_none_asks_for_nothing(value: str) -> None:
    assert retry_after_s(value, 1000.0) is None


def test_a_text_that_is_no_utf_8_can_be_sent() -> None:
    with JudgeServer(in_turn(FINE)) as server:
        assert using(server.url, lambda client: client.post({"response": "\ud800"})) == {"score": 0.5}
    assert json.dumps(server.bodies[0]) == json.dumps({"response": "\ud800"})
