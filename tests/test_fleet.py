"""Which orders to add and remove samplers are carried out, and which are refused with the reason."""

from pathlib import Path
from typing import Any

import pytest

from stream_grpo.config_file import parse
from stream_grpo.errors import ConfigError, OrderError
from stream_grpo.fleet import Fleet


class FakeLauncher:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, Any]] = {}
        self.leaving: dict[str, float] = {}
        self.ran: list[str] = []
        self.why_not = ""

    def place(self, name: str, kind: str, **arguments: Any) -> None:
        self.parts[name] = {"kind": kind, **arguments}

    def run(self, *names: str) -> None:
        self.ran += names

    def has(self, name: str) -> bool:
        return name in self.parts

    def staying(self, kind: str) -> list[str]:
        return [name for name in self.parts if name not in self.leaving]

    def lacks(self, kind: str, number: int) -> str:
        return self.why_not

    def facts(self, name: str) -> dict[str, Any]:
        return {"name": name}

    def let_leave(self, name: str, within_s: float) -> None:
        self.leaving[name] = within_s

    def stop(self, *names: str) -> None:
        for name in names:
            del self.parts[name]


@pytest.fixture
def launcher() -> FakeLauncher:
    return FakeLauncher()


@pytest.fixture
def fleet(tmp_path: Path, launcher: FakeLauncher) -> Fleet:
    return fleet_of(tmp_path, launcher)


def fleet_of(root: Path, launcher: FakeLauncher, **sections: dict[str, Any]) -> Fleet:
    tree = {"model": {"path": "m"}, "run": {"root": str(root)}, "evaluation": {"interval": 0}, **sections}
    fleet = Fleet(parse(tree, "test"), launcher, lambda text: None)  # type: ignore[arg-type]
    fleet.place(curator="c", buffer="b")
    return fleet


def order(fleet: Fleet, what: str, **fields: Any) -> dict[str, Any]:
    return fleet.handlers[what](fields)


def test_added_samplers_have_new_names_and_begin_once_the_others_have(fleet: Fleet, launcher: FakeLauncher) -> None:
    assert order(fleet, "samplers.add", number=1)["added"] == ["sampler-1"]
    assert launcher.ran == []  # the launcher of the run begins all that are there
    fleet.has_begun()
    found = order(fleet, "samplers.add", number=2)
    assert found["added"] == launcher.ran == ["sampler-2", "sampler-3"]
    assert [sampler["name"] for sampler in found["samplers"]] == [f"sampler-{i}" for i in range(4)]
    assert found["configured"] == 1
    assert launcher.parts["sampler-3"] == {
        "kind": "sampler",
        "restarts": 10,
        "by_order": True,
        "sampler_id": "sampler-3",
        "curator": "c",
        "buffer": "b",
    }
    # One that has gone gives its name to nobody.
    launcher.stop("sampler-3")
    assert order(fleet, "samplers.add", number=1)["added"] == ["sampler-4"]
    assert fleet.present == ["sampler-0", "sampler-1", "sampler-2", "sampler-4"]


def test_one_leaves_within_its_time(fleet: Fleet, launcher: FakeLauncher) -> None:
    order(fleet, "samplers.add", number=1)
    assert order(fleet, "samplers.remove", name="sampler-0", within_s=5.0)["leaving"] == "sampler-0"
    assert launcher.leaving == {"sampler-0": 5.0}


def test_the_only_one_that_stays_is_not_removed(fleet: Fleet, launcher: FakeLauncher) -> None:
    order(fleet, "samplers.add", number=1)
    order(fleet, "samplers.remove", name="sampler-0", within_s=5.0)
    with pytest.raises(OrderError, match="--remove sampler-1: it is the only one"):
        order(fleet, "samplers.remove", name="sampler-1", within_s=5.0)


def test_the_first_one_is_not_removed_while_it_evaluates(tmp_path: Path, launcher: FakeLauncher) -> None:
    fleet = fleet_of(tmp_path, launcher, sampler={"num_samplers": 2}, evaluation={"interval": 25})
    with pytest.raises(OrderError, match=r"sampler-0: the first .* \(evaluation\.interval = 25\); remove another"):
        order(fleet, "samplers.remove", name="sampler-0", within_s=5.0)
    order(fleet, "samplers.remove", name="sampler-1", within_s=5.0)


def test_orders_that_cannot_be_carried_out_are_refused_with_the_reason(
    fleet: Fleet, tmp_path: Path, launcher: FakeLauncher
) -> None:
    with pytest.raises(OrderError, match="--remove sampler-7: no such sampler; there are sampler-0"):
        order(fleet, "samplers.remove", name="sampler-7", within_s=5.0)
    with pytest.raises(OrderError, match="--within -1: expected 0 to"):
        order(fleet, "samplers.remove", name="sampler-0", within_s=-1)
    with pytest.raises(OrderError, match="--add 4096: expected 1 to 4095, as a run has 4096 samplers at most"):
        order(fleet, "samplers.add", number=4096)
    with pytest.raises(OrderError, match="--add 0: expected 1 to"):
        order(fleet, "samplers.add", number=0)
    launcher.why_not = "2 GPUs are needed and 1 are free"
    with pytest.raises(OrderError, match="--add 2: 2 GPUs are needed and 1 are free"):
        order(fleet, "samplers.add", number=2)
    assert list(launcher.parts) == ["sampler-0"]
    large = fleet_of(tmp_path, FakeLauncher(), sampler={"kv_cache_bytes": 1 << 50})
    with pytest.raises(ConfigError, match="this machine has"):
        order(large, "samplers.add", number=1)
    fleet.end()
    with pytest.raises(OrderError, match="training has ended"):
        order(fleet, "samplers.add", number=1)
