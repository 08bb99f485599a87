"""An order is carried out once and answered, or nothing is done and whoever gave it knows."""

import fcntl
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stream_grpo import orders
from stream_grpo.errors import ConfigError, OrderError
from stream_grpo.orders import FOLDER, Orders, give


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "lock").touch()
    return tmp_path


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    with (run_dir / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def served(run_dir: Path, handler: Any) -> Iterator[None]:
    """A launcher that looks for orders."""
    stop, taking = threading.Event(), Orders(run_dir, {"double": handler})

    def serve() -> None:
        while not stop.is_set():
            taking.turn()
            time.sleep(0.005)

    thread = threading.Thread(target=serve)
    with held(run_dir):
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def double(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"is": 2 * fields["number"]}


def test_an_order_is_carried_out_and_answered_and_leaves_nothing_behind(run_dir: Path) -> None:
    with served(run_dir, double):
        assert give(run_dir, "double", {"number": 4}) == {"is": 8}
        assert give(run_dir, "double", {"number": 5}) == {"is": 10}
    assert list((run_dir / FOLDER).iterdir()) == []


def test_a_refusal_comes_back_as_the_error_of_whoever_gave_the_order(run_dir: Path) -> None:
    def refuse(fields: Mapping[str, Any]) -> dict[str, Any]:
        raise ConfigError("--add 9: too many")

    with served(run_dir, refuse):
        with pytest.raises(OrderError, match="--add 9: too many"):
            give(run_dir, "double")
        with pytest.raises(OrderError, match="unknown order 'halve'; known: double"):
            give(run_dir, "halve")


def test_a_run_that_nobody_runs_is_said_to_be_none(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(OrderError, match="nobody runs this run; go on with: stream-grpo train --resume"):
        give(run_dir, "double", taken_within_s=0.1)
    assert list((run_dir / FOLDER).iterdir()) == []
    with pytest.raises(OrderError, match="no run there"):
        give(tmp_path / "none", "double")


def test_what_is_not_taken_in_time_is_withdrawn_and_never_carried_out(run_dir: Path) -> None:
    done: list[Any] = []
    with held(run_dir), pytest.raises(OrderError, match=r"within 0\.1 s; it is withdrawn, and nothing was done"):
        give(run_dir, "double", taken_within_s=0.1)
    Orders(run_dir, {"double": lambda fields: done.append(fields) or {}}).turn()
    assert done == []


def test_an_order_of_somebody_killed_is_dropped_after_its_time(run_dir: Path) -> None:
    done: list[Any] = []
    (run_dir / FOLDER).mkdir()
    order = {"name": "double", "fields": {}, "until_s": time.time() - 1}
    (run_dir / FOLDER / "a.json").write_text(json.dumps(order))
    (run_dir / FOLDER / "b.json").write_text("[")
    (run_dir / FOLDER / "c.json").write_text(json.dumps(order | {"until_s": time.time() + 60}))
    Orders(run_dir, {"double": lambda fields: done.append(fields) or {}}).turn()
    assert done == [{}]
    assert sorted(path.name for path in (run_dir / FOLDER).iterdir()) == ["a.answer", "c.answer"]
    # The next start finds nothing of it.
    Orders(run_dir, {})
    assert list((run_dir / FOLDER).iterdir()) == []


def test_who_waits_while_the_clock_of_the_run_is_ahead_is_told_that_nothing_was_done(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    # Whoever gives it has a clock that is an hour behind: by the run's the time of every order is over.
    giver = threading.current_thread()
    clock = SimpleNamespace(
        time=lambda: time.time() - 3600 * (threading.current_thread() is giver),
        monotonic=time.monotonic,
        sleep=time.sleep,
    )
    monkeypatch.setattr(orders, "time", clock)
    monkeypatch.setattr(orders, "ANSWERED_WITHIN_S", 0.5)
    told = pytest.raises(OrderError, match="too late, by the clock of the run's machine; nothing was done")
    with served(run_dir, lambda fields: done.append(fields) or {}), told:
        give(run_dir, "double", taken_within_s=0.5)
    assert done == []


@pytest.mark.parametrize(
    "order",
    [
        {"name": "double", "fields": [4]},
        {"name": "double", "fields": None},
        {"name": "double", "fields": {}},
        {"name": ["double"], "fields": {}},
        {"name": "double"},
        {"name": "double", "fields": {"number": 4}, "until_s": "tomorrow"},
    ],
)
def test_what_is_no_order_does_not_end_the_run(run_dir: Path, order: dict[str, Any]) -> None:
    def get(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"is": fields.get("number") * 2}  # type: ignore[operator]

    (run_dir / FOLDER).mkdir()
    (run_dir / FOLDER / "a.json").write_text(json.dumps({"until_s": time.time() + 60, **order}))
    (run_dir / FOLDER / "b.json").write_text(
        json.dumps({"name": "double", "fields": {"number": 4}, "until_s": time.time() + 60})
    )
    Orders(run_dir, {"double": get}).turn()
    assert json.loads((run_dir / FOLDER / "b.answer").read_text()) == {"is": 8}
    assert not list((run_dir / FOLDER).glob("*.json"))


def test_what_the_disk_refuses_is_logged_once_and_the_run_goes_on(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (run_dir / FOLDER).mkdir()
    (run_dir / FOLDER / "a.json").write_text(json.dumps({"name": "double", "fields": {"number": 4}, "until_s": 9e9}))
    taking = Orders(run_dir, {"double": double})

    def refuse(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "rename", refuse)
        taking.turn()
        taking.turn()
    assert [record.getMessage().count("No space left") for record in caplog.records] == [1]
    with monkeypatch.context() as full:
        full.setattr(orders, "replace_with", refuse)
        taking.turn()
    assert list((run_dir / FOLDER).iterdir()) == []
