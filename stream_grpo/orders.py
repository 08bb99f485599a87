"""Orders to a running run: files in its folder, which its launcher takes and answers.

An order is `orders/<id>.json`. The launcher takes it by a rename, and answers in `<id>.answer`: until it is taken,
whoever gave it can withdraw it, and nothing was done; once it is taken, the answer says what was. Whoever may write
into the folder of a run may give it orders, from every machine that shares it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stream_grpo.errors import OrderError, StreamGrpoError
from stream_grpo.files import read_object, replace_with

FOLDER = "orders"
TAKEN_WITHIN_S = 10.0
"""A launcher looks several times a second; one that takes nothing for so long is stopped or hangs."""
ANSWERED_WITHIN_S = 30.0
"""What an order takes once it was taken."""
_LOOK_S = 0.05
_DOUBT_S = 1.0
"""After so long without being taken it is asked whether the run is alive at all."""
_TOO_LATE = "taken too late, by the clock of the run's machine; nothing was done"
_log = logging.getLogger(__name__)

Handler = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Carries an order out by its fields, at once, and gives the answer. Raises StreamGrpoError to refuse it."""


def give(
    run_dir: Path, name: str, fields: Mapping[str, Any] | None = None, *, taken_within_s: float = TAKEN_WITHIN_S
) -> dict[str, Any]:
    """Give an order and wait for its answer.

    Raises OrderError where there is no run, where nobody runs it, where it refuses, and where it does not answer in
    time; the message says whether anything may have been done.
    """
    if not (run_dir / "config.toml").exists():
        raise OrderError(f"{run_dir}: no run there (no config.toml)")
    folder, begun = run_dir / FOLDER, time.monotonic()
    folder.mkdir(exist_ok=True)
    order = folder / f"{uuid.uuid4().hex}.json"
    until_s = time.time() + taken_within_s
    replace_with(order, json.dumps({"name": name, "fields": dict(fields or {}), "until_s": until_s}).encode())
    try:
        while (answer := _answer_to(order)) is None:
            waited_s = time.monotonic() - begun
            if waited_s > min(_DOUBT_S, taken_within_s) and not is_run(run_dir):
                raise OrderError(f"{run_dir}: nobody runs this run; go on with: stream-grpo train --resume {run_dir}")
            if waited_s > taken_within_s and _withdraw(order):
                raise OrderError(
                    f"{run_dir}: the run did not take '{name}' within {taken_within_s:g} s; it is withdrawn, and "
                    f"nothing was done"
                )
            if waited_s > taken_within_s + ANSWERED_WITHIN_S:
                raise OrderError(
                    f"{run_dir}: the run took '{name}' and did not answer within {ANSWERED_WITHIN_S:g} s; what it did "
                    f"is in its output"
                )
            time.sleep(_LOOK_S)
    finally:
        _withdraw(order)
    order.with_suffix(".answer").unlink(missing_ok=True)
    if "refused" in answer:
        raise OrderError(str(answer["refused"]))
    return answer


def is_run(run_dir: Path) -> bool:
    """Whether a process holds the folder of this run."""
    try:
        with (run_dir / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _answer_to(order: Path) -> dict[str, Any] | None:
    answer = order.with_suffix(".answer")
    return read_object(answer) if answer.exists() else None


def _withdraw(order: Path) -> bool:
    """Whether nobody had taken it."""
    try:
        order.unlink()
    except FileNotFoundError:
        return False
    return True


class Orders:
    """The launcher's side."""

    def __init__(self, run_dir: Path, handlers: Mapping[str, Handler]) -> None:
        """What an earlier start has left is removed."""
        self._folder, self._handlers = run_dir / FOLDER, handlers
        self._stuck: set[Path] = set()
        """Orders that cannot be taken or answered, of which that was said."""
        for left in (*self._folder.glob("*.answer"), *self._folder.glob("*.taken"), *self._folder.glob(".*")):
            left.unlink(missing_ok=True)

    def turn(self) -> None:
        """Take and answer what has come, the oldest first. What is no order, and what the disk refuses, is logged."""
        for order in sorted(self._folder.glob("*.json"), key=_age):
            taken = order.with_suffix(".taken")
            try:
                order.rename(taken)
                self._answer(taken)
            except FileNotFoundError:
                pass  # withdrawn
            except OSError as error:
                if order not in self._stuck:
                    _log.warning("%s cannot be taken and answered: %s", order, error)
                self._stuck.add(order)

    def _answer(self, taken: Path) -> None:
        try:
            order = read_object(taken)
            # The clock of whoever gave it may be another: one that still waits is told.
            answer = self._carry_out(order) if time.time() <= order["until_s"] else {"refused": _TOO_LATE}
            replace_with(taken.with_suffix(".answer"), json.dumps(answer).encode())
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("%s is no order: %r", taken, error)
        finally:
            taken.unlink()

    def _carry_out(self, order: Mapping[str, Any]) -> dict[str, Any]:
        handler = self._handlers.get(order["name"])
        if handler is None:
            return {"refused": f"unknown order '{order['name']}'; known: {', '.join(self._handlers)}"}
        if not isinstance(order["fields"], Mapping):
            return {"refused": f"fields = {order['fields']!r} of order '{order['name']}': expected an object"}
        try:
            return handler(order["fields"])
        except StreamGrpoError as error:
            return {"refused": str(error)}


def _age(path: Path) -> tuple[float, str]:
    with suppress(OSError):
        return path.stat().st_mtime, path.name
    return 0.0, path.name
