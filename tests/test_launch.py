"""A part that does not answer is named; one that dies for good ends the run, unless others do the same work."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RaySystemError, RayTaskError

from stream_grpo import host, launch, local_ray
from stream_grpo.config_file import parse
from stream_grpo.errors import RankError, RunFailed
from stream_grpo.launch import SILENCE_S, Launcher
from stream_grpo.placed import Placed


class FakeHandle:
    """An actor of which `status.remote()` gives a reference; how often it was asked is counted."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.status = self.run = self

    def remote(self) -> int:
        self.num_asked += 1
        return self.num_asked


class FakeRay:
    """`ray.get` for `FakeHandle`: a status, or a timeout for whoever hangs."""

    def __init__(self) -> None:
        self.hangs = False
        self.timeouts: list[float] = []

    def get(self, reference: int, timeout: float) -> dict[str, int]:
        self.timeouts.append(timeout)
        if self.hangs:
            raise GetTimeoutError
        return {"reference": reference}


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def launcher(tmp_path: Path, said: list[str]) -> Launcher:
    config = parse({"model": {"path": "m"}, "run": {"root": str(tmp_path), "name": "r"}}, "test")
    launcher = Launcher(config, said.append)
    for name, pid in (("sampler-0", 11), ("learner", 12)):
        placed = Placed(name=name, kind=name.split("-")[0], arguments={}, restarts_left=0, pid=pid)
        placed.handle, placed.running = FakeHandle(), object()
        launcher._parts[name] = placed
    return launcher


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray, "get", fake.get)
    return fake


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic time that the launcher sees."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_weights_of_a_run_that_is_gone_are_not_those_of_the_next_one_of_its_name(tmp_path: Path) -> None:
    pulled = tmp_path / "weights" / "0.00000009"
    for manifest, is_kept in ((b"first", False), (b"first", True), (b"second", False)):
        pulled.mkdir(parents=True, exist_ok=True)
        host.unpack({"manifest.json": manifest}, tmp_path)
        assert pulled.exists() is is_kept
        assert (tmp_path / "manifest.json").read_bytes() == manifest


def test_a_part_that_hangs_is_asked_once_waited_for_once_and_named_once(
    launcher: Launcher, fake_ray: FakeRay, now: list[float], said: list[str]
) -> None:
    assert launcher.status("sampler-0") == {"reference": 1}
    assert launcher.silent() == []
    fake_ray.hangs = True
    for _ in range(3):
        assert launcher.status("sampler-0") == {"reference": 1}  # the last known one
        now[0] += SILENCE_S / 2 + 1
    launcher.status("sampler-0")
    handle: Any = launcher._parts["sampler-0"].handle
    assert handle.num_asked == 2
    assert fake_ray.timeouts == [5.0, 5.0, 0.0, 0.0, 0.0]  # a turn of the launcher is held up no further
    # Asked at 1000: at 1032 silent for 32 s.
    assert said == ["sampler-0 (process 11) has not answered for 32 s: it is stopped or hangs"]
    assert launcher.silent() == ["sampler-0 (process 11) has not answered for 48 s: it is stopped or hangs"]
    fake_ray.hangs = False
    assert launcher.status("sampler-0") == {"reference": 2}
    assert said[1:] == ["sampler-0 answers again"]
    assert launcher.silent() == []


def test_an_error_that_ends_the_run_names_who_else_does_not_answer(
    launcher: Launcher, fake_ray: FakeRay, now: list[float]
) -> None:
    fake_ray.hangs = True
    launcher.status("sampler-0")
    now[0] += 20
    with pytest.raises(RunFailed, match=r"learner died .*; sampler-0 \(process 11\) has not answered for 20 s"):
        launcher._restart(launcher._parts["learner"], RayActorError())


def add_sampler(launcher: Launcher, name: str) -> None:
    placed = Placed(name=name, kind="sampler", arguments={}, restarts_left=0, pid=13)
    placed.handle, placed.running = FakeHandle(), object()
    launcher._parts[name] = placed


def test_report_c28_with_one_of_two_samplers_dead_for_good_the_run_goes_on_and_says_so(
    launcher: Launcher, said: list[str]
) -> None:
    add_sampler(launcher, "sampler-1")
    launcher._restart(launcher._parts["sampler-0"], RayActorError())
    assert len(said) == 1
    assert said[0].startswith("sampler-0 died (process 11; log: ")
    assert said[0].endswith("; it has no restarts left, the other samplers go on without it")
    launcher.run("sampler-0", "sampler-1")  # as `train` does with all of them
    assert launcher._parts["sampler-0"].running is None
    assert launcher.status("sampler-0") == {}
    # The next one to die for good is the last.
    with pytest.raises(RunFailed, match=r"sampler-1 died \(process 13"):
        launcher._restart(launcher._parts["sampler-1"], RayActorError())


def test_report_c28_with_the_last_sampler_dead_for_good_the_run_ends_with_the_cause(
    launcher: Launcher, said: list[str]
) -> None:
    with pytest.raises(RunFailed, match=r"sampler-0 died \(process 11; log: .*sampler-0\.log\)"):
        launcher._restart(launcher._parts["sampler-0"], RayActorError())


def test_report_c23_whoever_dies_is_named_with_its_process_and_started_again(
    launcher: Launcher, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(launcher, "_start", lambda placed: started.append(placed.name))
    monkeypatch.setattr(launch, "kill", lambda handle: None)
    launcher._parts["sampler-0"].restarts_left = 2
    launcher._restart(launcher._parts["sampler-0"], RayActorError())
    assert started == ["sampler-0"]
    assert said[0].startswith("sampler-0 died (process 11; log: ")
    assert said[0].endswith("; starting it again (1 restarts left)")


@pytest.fixture
def started(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A learner of two ranks; gives the parts that are started again."""
    for name, pid in (("learner", 12), ("learner-1", 13)):
        placed = Placed(name=name, kind="learner", arguments={}, restarts_left=2, team="learner", pid=pid)
        placed.handle, placed.running = FakeHandle(), name
        launcher._parts[name] = placed
    started: list[str] = []
    monkeypatch.setattr(launcher, "_start", lambda placed: started.append(placed.name))
    monkeypatch.setattr(launch, "kill", lambda handle: None)
    monkeypatch.setattr(launch, "is_alive", lambda pid: False)
    return started


def ending(monkeypatch: pytest.MonkeyPatch, **errors: RayError) -> None:
    """How the parts' loops end; one that is not named goes on."""

    def get(name: str, timeout: float) -> None:
        raise errors.get(name.replace("-", "_"), GetTimeoutError())

    monkeypatch.setattr(ray, "get", get)


def raised(cause: Exception) -> RayTaskError:
    return RayTaskError("run", "", cause)


def test_ranks_are_started_again_together_and_the_one_that_died_is_named(
    launcher: Launcher, started: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first rank lost the other, and is heard of first.
    lost = raised(RankError("rank 0 of 2 in 'train': rank 1 died"))
    ending(monkeypatch, learner_1=RayActorError())
    earlier = launcher._rendezvous.get("learner")
    launcher._restart(launcher._parts["learner"], lost)
    assert started == ["learner", "learner-1"]
    assert [part.restarts_left for part in launcher._team_of(launcher._parts["learner"])] == [1, 1]
    assert said[0].startswith("learner-1 died (process 13; log: ")
    assert said[0].endswith("; starting learner and learner-1 again (1 restarts left)")
    # Where the old ones met nobody meets again.
    assert launcher._rendezvous["learner"] != earlier
    assert launcher._rendezvous["learner"].parent.is_dir()


def test_ranks_that_wait_for_one_that_hangs_are_started_again_with_its_name(
    launcher: Launcher, started: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ending(monkeypatch)
    lost = raised(RankError("rank 0 of 2 in 'train': rank 1 died, or did not answer within 600 s"))
    launcher._restart(launcher._parts["learner"], lost)
    assert started == ["learner", "learner-1"]
    assert "learner failed: RankError: rank 0 of 2 in 'train': rank 1 died, or did not answer within 600 s" in said[0]


def test_a_rank_that_raised_ends_the_run_with_its_error(
    launcher: Launcher, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ending(monkeypatch, learner_1=raised(ValueError("a bad group")))
    with pytest.raises(RunFailed, match="learner-1 failed: ValueError: a bad group"):
        launcher._restart(launcher._parts["learner"], raised(RankError("rank 1 failed")))
    assert started == []


def test_a_rank_that_waits_for_a_failed_one_does_not_use_up_the_time_to_stop(
    launcher: Launcher, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: dict[Any, float] = {}

    def get(reference: Any, timeout: float) -> None:
        left[reference] = timeout
        if reference == "learner":
            raise raised(ValueError("a bad group"))
        if reference == "learner-1":
            raise GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    for name in ("learner", "learner-1"):
        handle: Any = launcher._parts[name].handle
        handle.stop = handle
    assert launcher.stop("learner", "learner-1") == ["learner", "learner-1"]
    assert left["learner"] > 20  # of run.stop_timeout_s = 25
    assert left["learner-1"] == launch.MIN_STOP_S


def test_a_ray_that_lost_a_process_of_its_own_ends_the_run(launcher: Launcher) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    launcher._ray = {"gcs_server": gone.pid}
    with pytest.raises(RunFailed, match=rf"Ray's gcs_server \(process {gone.pid}\) died, .*; go on with: .*--resume "):
        launcher.supervise("learner", every_s=0.1, each_turn=lambda: None)


def test_a_sampler_that_leaves_is_not_started_again_and_its_figures_stay(
    launcher: Launcher, fake_ray: FakeRay, said: list[str], now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(launch, "kill", killed.append)
    placed = launcher._parts["sampler-0"]
    placed.restarts_left, placed.handle.leave = 3, FakeHandle()
    placed.handle.leave.remote = lambda within_s: None
    launcher.let_leave("sampler-0", 60.0)
    assert (launcher.facts("sampler-0")["state"], launcher.staying("sampler")) == ("leaving", [])
    launcher._restart(placed, RayActorError())
    assert said[0].startswith("sampler-0 died (process 11; log: ")
    assert said[0].endswith("while it was leaving; its tickets are issued again after stream.ticket_timeout_s")
    assert killed == [placed.handle]
    assert not launcher.has("sampler-0")
    assert launcher.statuses("sampler-0") == [{"reference": 1}]


def test_a_sampler_that_does_not_leave_in_time_is_killed(
    launcher: Launcher, fake_ray: FakeRay, said: list[str], now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "kill", lambda handle: None)
    placed = launcher._parts["sampler-0"]
    placed.handle.leave = FakeHandle()
    placed.handle.leave.remote = lambda within_s: None
    launcher.let_leave("sampler-0", 60.0)
    now[0] += 60 + launch.LEAVE_S
    launcher._end_overdue()
    assert launcher.has("sampler-0")
    now[0] += 1
    launcher._end_overdue()
    assert not launcher.has("sampler-0")
    assert said[-1].startswith("sampler-0 did not leave in time and is killed")


def test_a_part_on_a_node_out_of_reach_is_waited_for_and_not_started_again(
    launcher: Launcher, fake_ray: FakeRay, said: list[str], now: list[float]
) -> None:
    placed, cut = launcher._parts["sampler-0"], ActorUnavailableError("socket closed", None)
    # On one machine there is no cable: whoever is not there has died.
    assert not launcher._reaches_again(placed, cut)
    cluster = launcher._config.cluster.model_copy(update={"address": "10.0.0.1:6379"})
    launcher._config = launcher._config.model_copy(update={"cluster": cluster})
    placed.node = "10.0.0.2"
    for reference in (1, 2):
        assert launcher._reaches_again(placed, cut)
        assert placed.running == reference  # its loop once more, which goes on there
    assert said == ["sampler-0 (process 11 on 10.0.0.2) is out of reach; it may come back"]
    launcher.status("sampler-0")
    assert said[1:] == ["sampler-0 answers again"]
    assert not launcher._reaches_again(placed, RayActorError())


def test_a_ray_that_does_not_come_up_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []

    def init(**options: Any) -> None:
        starts.append(options["num_cpus"])
        if len(starts) < 3:
            raise RaySystemError("Failed to connect to GCS.")

    monkeypatch.setattr(local_ray.ray, "init", init)
    monkeypatch.setattr(local_ray.ray, "shutdown", lambda: None)
    monkeypatch.setattr(local_ray, "children", lambda programs: {})
    local_ray.start_local_ray(2)
    assert starts == [2, 2, 2]


def test_a_ray_that_never_comes_up_ends_the_run_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise RaySystemError("Failed to connect to GCS.")

    monkeypatch.setattr(local_ray.ray, "init", init)
    monkeypatch.setattr(local_ray.ray, "shutdown", lambda: None)
    monkeypatch.setattr(local_ray, "children", lambda programs: {})
    with pytest.raises(RunFailed, match=r"did not start in 3 tries: .*Failed to connect to GCS"):
        local_ray.start_local_ray(2)


@pytest.mark.parametrize(
    ("sections", "bound"),
    [
        ({}, {}),
        ({"cluster": {"address": "10.0.0.1:6379"}}, {"buffer": "server", "learner": "home", "follower": "home"}),
    ],
    ids=["one machine", "cluster"],
)
def test_on_a_cluster_all_ranks_are_told_at_which_address_the_first_gives_weights_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], bound: dict[str, str]
) -> None:
    built: dict[str, dict[str, Any]] = {}

    class Build:
        def remote(self, kind: str, arguments: dict[str, Any]) -> str:
            built[kind] = arguments
            return kind

    class Actor:
        build = Build()

        def options(self, **_: Any) -> "Actor":
            return self

        def remote(self, *_: Any) -> "Actor":
            return self

    class Nodes:
        home = None

        def __init__(self, *_: Any) -> None: ...

        def strategy(self, *_: Any, **__: Any) -> None: ...

        def bind(self) -> str:
            return "server"

        def bind_at_home(self) -> str:
            return "home"

    monkeypatch.setattr(launch, "Host", Actor())
    monkeypatch.setattr(launch, "Nodes", Nodes)
    tree: dict[str, Any] = {"model": {"path": "m"}, "run": {"root": str(tmp_path), "name": "r"}, **sections}
    launcher = Launcher(parse(tree, "test"), lambda _: None)
    for kind in ("buffer", "learner", "follower", "sampler"):
        launcher.place(kind, kind, team="learner" if kind in ("learner", "follower") else "")
    assert {kind: arguments["bind"] for kind, arguments in built.items() if "bind" in arguments} == bound
    assert built["learner"]["rendezvous"] == built["follower"]["rendezvous"]
