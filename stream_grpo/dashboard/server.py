"""The page over HTTP: a few static files, the runs, their rollouts. GET alone; nothing of a run is ever changed."""

from __future__ import annotations

import mimetypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stream_grpo.dashboard.access import Guard
from stream_grpo.dashboard.browsing import filters_of, find_decoder, group_page, groups_page
from stream_grpo.dashboard.views import RunView
from stream_grpo.errors import ConfigError, StreamGrpoError

READ_S, MIN_READ_S = 1.5, 0.1
"""What one request may read of the metrics of all runs, and of each at least; the next one goes on."""
INDEX = "index.html"


class NotThere(ConfigError):
    """Something that a request names does not exist."""


def make_app(run_dirs: Sequence[Path], token: str | None, *, read_ahead: bool = False) -> Starlette:
    """The application that shows these runs. `token` is what every request must bring; None: loopback alone.

    `read_ahead`: begin to read before anybody asks.
    """
    runs = {view.name: view for view in views_of(run_dirs)}
    for view in runs.values() if read_ahead else ():
        threading.Thread(target=view.read_ahead, name=f"read-{view.name}", daemon=True).start()
    static = static_files()
    return Starlette(
        routes=[
            Route("/", partial(_file, static, name=INDEX)),
            Route("/static/{name}", partial(_file, static)),
            Route("/api/runs", _as_json(partial(_updates, runs))),
            Route("/api/runs/{run}/groups", _as_json(partial(_groups, runs))),
            Route("/api/runs/{run}/groups/{group}", _as_json(partial(_group, runs))),
        ],
        middleware=[Middleware(Guard, token=token), Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1)],
    )


def views_of(run_dirs: Sequence[Path]) -> list[RunView]:
    """The runs under names that differ: that of the folder, and where two have one name, with that of its parent."""
    paths = [run_dir.resolve() for run_dir in run_dirs]
    names = [path.name for path in paths]
    return [
        RunView(path.name if names.count(path.name) == 1 else f"{path.parent.name}:{path.name}", path) for path in paths
    ]


def static_files() -> dict[str, tuple[str, bytes]]:
    """Type and content by name. They are read once: no request names a path."""
    folder = files("stream_grpo.dashboard") / "static"
    return {
        entry.name: (mimetypes.guess_type(entry.name)[0] or "application/octet-stream", entry.read_bytes())
        for entry in folder.iterdir()
    }


async def _file(static: Mapping[str, tuple[str, bytes]], request: Request, name: str = "") -> Response:
    found = static.get(name or request.path_params["name"])
    if found is None:
        return Response("not there", 404, media_type="text/plain")
    return Response(found[1], media_type=found[0])


def _as_json(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """An endpoint that runs in a thread, and says in a sentence what it cannot do."""

    def endpoint(request: Request) -> Response:
        try:
            value, status = answer(request), 200
        except NotThere as error:
            value, status = {"error": str(error)}, 404
        except ConfigError as error:
            value, status = {"error": str(error)}, 400
        except (StreamGrpoError, OSError) as error:
            value, status = {"error": str(error)}, 500
        return Response(msgspec.json.encode(value), status, media_type="application/json")

    return endpoint


def _updates(runs: Mapping[str, RunView], request: Request) -> dict[str, Any]:
    """Every run; `since` has a cursor for each, in their order, between commas."""
    since = request.query_params.get("since", "").split(",")
    cursors = since if len(since) == len(runs) else [""] * len(runs)
    until = time.monotonic() + READ_S
    return {
        "runs": [
            view.update(cursor, max(MIN_READ_S, until - time.monotonic()))
            for view, cursor in zip(runs.values(), cursors, strict=True)
        ]
    }


def _groups(runs: Mapping[str, RunView], request: Request) -> dict[str, Any]:
    return groups_page(_run(runs, request).run_dir, filters_of(request.query_params))


def _group(runs: Mapping[str, RunView], request: Request) -> dict[str, Any]:
    run_dir = _run(runs, request).run_dir
    try:
        return group_page(run_dir, request.path_params["group"], find_decoder(run_dir))
    except ConfigError as error:
        raise NotThere(str(error)) from error


def _run(runs: Mapping[str, RunView], request: Request) -> RunView:
    name = request.path_params["run"]
    if name not in runs:
        raise NotThere(f"run {name}: not shown here; there are {', '.join(runs)}")
    return runs[name]
