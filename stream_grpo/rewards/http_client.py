"""One endpoint behind a URL: places, attempts with a deadline, waits between them. Knows no judge.

    asked -> waits for a place -> attempt -> reply
                  ^                 `-> 408, 429, 5xx, no connection, too slow -> waits without a place --.
                  `--------------------------------------------------------------------------------------'

The wait after attempt n is uniform in [0, backoff 2^(n - 1)], at most a minute ("full jitter": M. Brooker, Exponential
Backoff And Jitter, AWS Architecture Blog, 2015). A Retry-After holds back every request to the endpoint instead.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from stream_grpo.config_http import Endpoint
from stream_grpo.rewards.judging import EndpointError, api_key
from stream_grpo.rewards.result import shown

_RETRIED = frozenset({408, 429})
_MAX_BACKOFF_S = 60.0
_MAX_REPLY_BYTES = 4 << 20


class _RetryableError(EndpointError):
    """Another attempt may have a reply. `after_s`: what the server asks to wait, or None."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class EndpointClient:
    """Asks one endpoint. Belongs to one event loop, but for `status`."""

    def __init__(
        self, settings: Endpoint, *, jitter: Callable[[], float] = random.random, transport: Any = None
    ) -> None:
        """`jitter`: uniform in [0, 1). Raises ConfigError where the key's variable is not set."""
        self._settings, self._jitter, self._key = settings, jitter, api_key(settings)
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self._key}"} if self._key else {})
        limits = httpx.Limits(max_connections=settings.max_concurrent)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None, transport=transport)
        self._places = asyncio.Semaphore(settings.max_concurrent)
        self._not_before = 0.0
        self.num_waiting, self.num_running, self.num_retries = 0, 0, 0

    async def post(self, body: Any) -> dict[str, Any]:
        """The JSON object of the reply. Raises EndpointError where there is none within the attempts and the time."""
        content, deadline, num_tries = json.dumps(body).encode(), math.inf, 0
        while True:
            try:
                async with self._place():
                    if num_tries == 0:  # the time of a request begins with its first attempt
                        deadline = time.monotonic() + self._settings.total_s
                    num_tries += 1
                    return await self._attempt(content, deadline)
            except _RetryableError as error:
                wait_s = self._wait_s(error, num_tries)
                if num_tries > self._settings.max_retries or time.monotonic() + wait_s >= deadline:
                    tries = "1 attempt" if num_tries == 1 else f"{num_tries} attempts"
                    raise EndpointError(f"{error}, after {tries}") from error
            self.num_retries += 1
            await asyncio.sleep(wait_s)

    async def close(self) -> None:
        """End all connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        self.num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self._places.release()

    async def _attempt(self, content: bytes, deadline: float) -> dict[str, Any]:
        await self._held_back(deadline)
        timeout_s = max(0.0, min(self._settings.timeout_s, deadline - time.monotonic()))
        try:
            async with asyncio.timeout(timeout_s):
                status, headers, text = await self._exchange(content)
        except TimeoutError:
            raise _RetryableError(f"no whole reply within {timeout_s:.3g} s") from None
        except httpx.TransportError as error:
            raise _RetryableError(f"{type(error).__name__}: {self._without_key(str(error))}") from None
        if status in _RETRIED or status >= 500:
            after_s = retry_after_s(headers.get("retry-after", ""), time.time())
            if after_s is not None:
                self._not_before = max(self._not_before, time.monotonic() + after_s)
            raise _RetryableError(f"status {status}: {shown(self._without_key(text))}", after_s)
        if status != 200:
            raise EndpointError(f"status {status}: {shown(self._without_key(text))}")
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError):
            raise EndpointError(f"the reply is not JSON: {shown(self._without_key(text))}") from None
        if not isinstance(reply, dict):
            raise EndpointError(f"the reply is no JSON object: {shown(self._without_key(text))}")
        return reply

    async def _exchange(self, content: bytes) -> tuple[int, httpx.Headers, str]:
        async with self._client.stream("POST", self._settings.url, content=content) as response:
            data = bytearray()
            async for piece in response.aiter_bytes():
                data += piece
                if len(data) > _MAX_REPLY_BYTES:
                    raise EndpointError(f"a reply of more than {_MAX_REPLY_BYTES} bytes")
            return response.status_code, response.headers, data.decode(errors="replace")

    async def _held_back(self, deadline: float) -> None:
        """Wait as long as the server asked anybody to."""
        while (wait_s := self._not_before - time.monotonic()) > 0:
            if self._not_before >= deadline:
                raise EndpointError(f"the server asks to wait {wait_s:.0f} s longer, which is too long")
            await asyncio.sleep(wait_s)

    def _wait_s(self, error: _RetryableError, num_tries: int) -> float:
        if error.after_s is not None:
            return error.after_s
        return self._jitter() * min(_MAX_BACKOFF_S, self._settings.backoff_s * 2.0 ** (num_tries - 1))

    def _without_key(self, text: str) -> str:
        """A server may well repeat the key that it was given."""
        return text.replace(self._key, "***") if self._key else text


def retry_after_s(value: str, now_s: float) -> float | None:
    """Seconds that a Retry-After asks to wait, given as such or as a date (RFC 9110, 10.2.3); None where it is none.

    `now_s`: unix time.
    """
    with suppress(ValueError, OverflowError):
        seconds = float(value)
        return seconds if 0 <= seconds < float("inf") else None
    with suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - now_s)
    return None
