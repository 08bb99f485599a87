"""Who may see the page, and what a browser may do with it.

On loopback whoever is on the machine may look, but no page of another site: its requests name another host. Elsewhere a
token is needed. A link carries it once; from then on the browser has it as a cookie that no script reads.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "stream-grpo-token"
"""How the cookie's name begins. Its end is the port: browsers give a host's cookies to all of its ports, and each page
has a token of its own."""
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer. Text of models is hostile: nothing that it could say is run, loaded or sent anywhere."""


def new_token() -> str:
    """A token that cannot be guessed: 256 bits."""
    return secrets.token_urlsafe(32)


def is_loopback(host: str) -> bool:
    """Whether an address, or a name, is of this machine alone."""
    name = host.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Guard:
    """Lets through who may see the page. With a token: whoever has it; without: requests to a name of loopback."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An application, as ASGI has it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._answer(Request(scope))
        await (answer or self._app)(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """What is said instead of the page; None where it may be seen."""
        if self._token is None:
            # A name that another site has given this address: its scripts would read what the page shows.
            name, _ = _host_and_port(request)
            return None if is_loopback(name) else PlainTextResponse("not a name of this machine", 403)
        cookie = f"{COOKIE}-{_host_and_port(request)[1]}"
        named = request.query_params.get("token")
        if named is not None and self._is_token(named):
            rest = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
            answer = RedirectResponse(f"/{request.url.path.lstrip('/')}{'?' if rest else ''}{urlencode(rest)}", 303)
            # Over plain HTTP too: the page has no certificate of its own. Lax: a link in a chat or a wiki has to work,
            # and a link is all that another site can make of it, since requests change nothing.
            answer.set_cookie(cookie, self._token, httponly=True, samesite="lax", path="/")
            return answer
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        given = credentials if scheme.lower() == "bearer" else request.cookies.get(cookie, "")
        if self._is_token(given):
            return None
        return PlainTextResponse("the link of this page has a token, which this one lacks", 401)

    def _is_token(self, given: str) -> bool:
        assert self._token is not None
        return secrets.compare_digest(given.encode(), self._token.encode())


def _host_and_port(request: Request) -> tuple[str, str]:
    """By what name and port the browser knows the page; no port where it is the usual one, or is no number."""
    host = request.headers.get("host", "").rpartition("@")[2]
    name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
    port = host.removeprefix(name).removeprefix(":")
    return name, port if port.isascii() and port.isdigit() else ""
