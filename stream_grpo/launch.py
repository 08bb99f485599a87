"""Places the processes of a run as Ray actors, restarts what dies, stops them in order."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from stream_grpo import parts, placement
from stream_grpo.config import Config
from stream_grpo.errors import RankError, RunFailed, StallError
from stream_grpo.host import Host
from stream_grpo.lifetime import children, is_alive
from stream_grpo.local_ray import RAY_PROGRAMS
from stream_grpo.nodes import SERVERS, Nodes
from stream_grpo.parts_common import files_to_send
from stream_grpo.placed import Placed

BUILD_TIMEOUT_S = 300.0
STATUS_TIMEOUT_S = 5.0
LOOK_S = 1.0
"""How often Ray itself is looked at while a part is built."""
SILENCE_S = 30.0
"""A part that has not answered for so long is named."""
CAUSE_S = 2.0
"""Where one of several parts that live and die together ended, how long the errors of the others are waited for."""
KILLED_S = 10.0
"""How long a killed process may take to be gone."""
LEAVE_S = 30.0
"""What a sampler that leaves gets beyond its time, to hand over what it has and to say goodbye."""
MIN_STOP_S = 0.3
"""What the last part to stop gets where others have used up the time."""
_TICKETS_END = "its tickets are issued again after stream.ticket_timeout_s"


class Launcher:
    """The parts of one run on Ray."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self._log_dir = config.run_dir / "logs"
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._parts: dict[str, Placed] = {}
        self._rendezvous: dict[str, Path | str] = {}
        """Where the parts of a team find each other, new with every start of it: a file, or over nodes HOST:PORT."""
        self._left: dict[str, list[dict[str, Any]]] = {}
        """Of the parts that have left, the last status of every incarnation."""
        self._ray: dict[str, int] = {}
        """Process ids of the local Ray by program."""
        self._nodes = Nodes(config)

    def place(
        self, name: str, kind: str, *, restarts: int = 0, team: str = "", by_order: bool = False, **arguments: Any
    ) -> None:
        """Start the process and let it build its part; `built` waits for that."""
        self._ray = self._ray or children(RAY_PROGRAMS)
        self._parts[name] = Placed(
            name=name, kind=kind, arguments=arguments, restarts_left=restarts, team=team, by_order=by_order
        )
        if team and team not in self._rendezvous:
            self._meet_anew(team)
        self._start(self._parts[name])

    def _meet_anew(self, team: str) -> None:
        if placement.spans_nodes(self._config):
            self._rendezvous[team] = self._nodes.free_address()
            return
        folder = self._config.run_dir / "ranks"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._rendezvous[team] = folder / uuid.uuid4().hex

    def _start(self, placed: Placed) -> None:
        resources = parts.RESOURCES[placed.kind](self._config)
        files = {} if self._config.cluster.node_root is None else files_to_send(self._config)
        placed.handle = Host.options(  # type: ignore[attr-defined]
            # A local Ray believes in as many cores as the configuration asks for.
            num_cpus=0 if placed.by_order and not self._config.cluster.address else resources.num_cpus,
            num_gpus=resources.num_gpus,
            runtime_env={"env_vars": resources.environment},
            scheduling_strategy=self._nodes.strategy(placed.name, placed.kind, by_order=placed.by_order),
        ).remote(placed.name, self._config, self._nodes.home, files)
        arguments = dict(placed.arguments)
        if placed.address:
            arguments["bind"] = placed.address  # peers find a restarted server where it was
        elif self._config.cluster.address and placed.kind in SERVERS:
            arguments["bind"] = self._nodes.bind()
        elif self._config.cluster.address and placed.kind in ("learner", "follower"):
            arguments["bind"] = self._nodes.bind_at_home()
        if placed.team:
            arguments["rendezvous"] = self._rendezvous[placed.team]
        placed.running = None
        placed.building = placed.handle.build.remote(placed.kind, arguments)

    def built(self, name: str) -> str:
        """Wait until a part and its team are built; returns its address. Raises RunFailed, StallError."""
        placed, deadline = self._parts[name], time.monotonic() + BUILD_TIMEOUT_S
        while building := {part.building: part for part in self._team_of(placed) if part.building}:
            self._check_ray()
            ended, _ = ray.wait(list(building), num_returns=1, timeout=LOOK_S)
            for reference in ended:
                try:
                    self._take_built(building[reference], ray.get(reference))
                except RayError as error:
                    self._restart(building[reference], error)
                    deadline = time.monotonic() + BUILD_TIMEOUT_S
            if not ended and time.monotonic() > deadline:
                raise StallError(f"{name} was not ready within {BUILD_TIMEOUT_S:.0f} s; see {self._log_dir}")
        return placed.address

    def _team_of(self, placed: Placed) -> list[Placed]:
        """The parts that live and die with it, itself among them."""
        return [
            other for other in self._parts.values() if other is placed or (placed.team and other.team == placed.team)
        ]

    def _take_built(self, placed: Placed, facts: Mapping[str, Any]) -> None:
        placed.address, placed.pid, placed.node, placed.building = facts["address"], facts["pid"], facts["node"], None

    def run(self, *names: str) -> None:
        """Start the loops of parts that are built; those of others begin once they are, while `supervise` watches."""
        for placed in (self._parts[name] for name in names):
            if not placed.is_given_up:
                placed.is_wanted = True
                if not placed.building:
                    placed.running = placed.handle.run.remote()

    def supervise(self, *until: str, every_s: float, each_turn: Callable[[], None]) -> list[Any]:
        """Watch all parts until the loops of `until` have ended, and return what they returned; start again what dies.

        Raises RunFailed when a part cannot be started again, or the local Ray loses a process of its own.
        """
        results: dict[str, Any] = {}
        while results.keys() != set(until):
            self._check_ray()
            at_work = [placed for placed in self._parts.values() if placed.name not in results]
            watched = {placed.running or placed.building: placed for placed in at_work}
            watched.pop(None, None)  # built, and waiting for its turn
            ended, _ = ray.wait(list(watched), num_returns=1, timeout=every_s)
            each_turn()
            self._end_overdue()
            for reference in ended:
                placed = watched[reference]
                if self._parts.get(placed.name) is not placed:
                    continue  # it has left meanwhile
                try:
                    result = ray.get(reference)
                except RayError as error:
                    if not self._reaches_again(placed, error):
                        self._restart(placed, error)
                    continue
                if placed.building:
                    self._take_built(placed, result)
                    if placed.is_wanted:
                        self.run(placed.name)
                elif placed.gone_by is not None:
                    self._let_go(placed, f"{placed.name} has left: its groups are handed over")
                elif placed.name in until:
                    results[placed.name] = result
                else:
                    raise RunFailed(f"{placed.name} ended before {' and '.join(until)} did")
        return [results[name] for name in until]

    def _check_ray(self) -> None:
        for program, pid in self._ray.items():
            if not is_alive(pid):
                raise RunFailed(
                    f"Ray's {program} (process {pid}) died, so that no part can be started again; go on with: "
                    f"stream-grpo train --resume {self._config.run_dir}"
                )

    def has(self, name: str) -> bool:
        """Whether there is such a part."""
        return name in self._parts

    def staying(self, kind: str) -> list[str]:
        """The parts of this kind that neither leave nor are given up."""
        return [
            placed.name
            for placed in self._parts.values()
            if placed.kind == kind and placed.gone_by is None and not placed.is_given_up
        ]

    def facts(self, name: str) -> dict[str, Any]:
        """How a part stands, in plain values."""
        placed = self._parts[name]
        facts = {name: getattr(placed, name) for name in ("name", "state", "pid", "node", "restarts_left")}
        return facts | {key: placed.last_status.get(key) for key in ("version", "num_running", "num_tokens")}

    def lacks(self, kind: str, number: int) -> str:
        """Why Ray cannot place so many more parts of a kind now; empty where it can."""
        needed, free = parts.RESOURCES[kind](self._config), ray.available_resources()
        wanted = {"CPU": needed.num_cpus if self._config.cluster.address else 0, "GPU": needed.num_gpus}
        short = [
            f"{number * each:g} {name}s are needed and {free.get(name, 0):g} are free"
            for name, each in wanted.items()
            if number * each > free.get(name, 0)
        ]
        return "; ".join(short)

    def let_leave(self, name: str, within_s: float) -> None:
        """Have a sampler leave within so many seconds; `supervise` sees to it that it is gone soon after."""
        placed = self._parts[name]
        if placed.running is None:
            self._let_go(placed, f"{name} has left: it had not begun")
            return
        placed.gone_by = time.monotonic() + within_s + LEAVE_S
        placed.handle.leave.remote(within_s)

    def _end_overdue(self) -> None:
        for placed in list(self._parts.values()):
            if placed.gone_by is not None and time.monotonic() > placed.gone_by:
                self._let_go(placed, f"{placed.name} did not leave in time and is killed; {_TICKETS_END}")

    def _let_go(self, placed: Placed, why: str) -> None:
        with suppress(RayError):
            self._ask(placed)
        kill(placed.handle)
        self._left[placed.name] = [*placed.earlier, placed.last_status]
        del self._parts[placed.name]
        self._say(why)

    def _reaches_again(self, placed: Placed, error: RayError) -> bool:
        """Wait anew for the loop of a part whose node is out of reach: it goes on, and Ray says if it has died."""
        is_cut = isinstance(error, ActorUnavailableError) and placed.running and self._config.cluster.address
        if not is_cut:
            return False
        if not placed.is_cut_off:
            self._say(f"{placed.name} (process {placed.pid} on {placed.node}) is out of reach; it may come back")
        placed.is_cut_off, placed.running = True, placed.handle.run.remote()
        return True

    def _restart(self, placed: Placed, error: RayError) -> None:
        self._check_ray()
        if placed.gone_by is not None:
            self._let_go(placed, f"{self._explain(placed, error)} while it was leaving; {_TICKETS_END}")
            return
        team = self._team_of(placed)
        placed, error = self._first_cause(team, placed, error)
        cause = self._explain(placed, error)
        # A part that raised has judged for itself; only a sampler's judgement is about itself alone.
        died = isinstance(error, RayActorError) or _lost_another(error)
        if placed.restarts_left == 0 and self._can_do_without(placed):
            placed.building, placed.running, placed.asking, placed.is_given_up = None, None, None, True
            self._say(f"{cause}; it has no restarts left, the other samplers go on without it")
            return
        if placed.restarts_left == 0 or not (died or placed.kind == "sampler"):
            raise RunFailed("; ".join([cause, *self._silent_besides(placed)]))
        whom = "it" if len(team) == 1 else " and ".join(part.name for part in team)
        self._say(f"{cause}; starting {whom} again ({placed.restarts_left - 1} restarts left)")
        for part in team:
            kill(part.handle)
        if placed.team:
            # One that still writes a checkpoint must not meet its successor.
            _await_end([part.pid for part in team if part.pid and self._is_here(part)])
            self._meet_anew(placed.team)
        for part in team:
            part.restarts_left -= 1
            part.earlier.append(part.last_status)
            part.last_status, part.asking, part.is_named, part.is_cut_off = {}, None, False, False
            self._start(part)

    def _is_here(self, placed: Placed) -> bool:
        """Whether its process is one of this machine."""
        return self._config.cluster.address is None or self._nodes.is_home(placed.node)

    def _first_cause(self, team: Sequence[Placed], placed: Placed, error: RayError) -> tuple[Placed, RayError]:
        """Of a team the part that ended for a reason of its own: the others lost it, and may be heard of first."""
        errors = {placed.name: error}
        deadline = time.monotonic() + CAUSE_S
        for part in team:
            reference = part.running or part.building
            if part is placed or reference is None:
                continue
            try:
                ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError:
                continue
            except RayError as other:
                errors[part.name] = other
        own = [name for name, found in errors.items() if not _lost_another(found)]
        # What a part raised says more than that it died.
        own.sort(key=lambda name: isinstance(errors[name], RayActorError))
        name = own[0] if own else placed.name
        return self._parts[name], errors[name]

    def _can_do_without(self, placed: Placed) -> bool:
        """Whether it is a sampler and there are others: where one is left, its groups are made."""
        return placed.kind == "sampler" and len(self.staying("sampler")) > 1

    def address(self, name: str) -> str:
        """Where others connect to a part."""
        return self._parts[name].address

    def status(self, name: str) -> dict[str, Any]:
        """A part's account of itself; the last known one where it does not answer."""
        placed = self._parts[name]
        # A part that died is dealt with by `supervise`; one that is being built has nothing to tell.
        if placed.running:
            with suppress(RayError):
                self._ask(placed)
        return placed.last_status

    def _ask(self, placed: Placed) -> None:
        """Take a status; one that does not come in time is waited for by later calls, which then do not block."""
        patience_s = 0.0 if placed.asking else STATUS_TIMEOUT_S
        if placed.asking is None:
            placed.asking, placed.asked_at = placed.handle.status.remote(), time.monotonic()
        try:
            placed.last_status = ray.get(placed.asking, timeout=patience_s)
        except GetTimeoutError:
            if not placed.is_named and placed.silent_s > SILENCE_S:
                placed.is_named = True
                self._say(placed.silence())
            return
        except RayError:
            placed.asking = None
            raise
        if placed.is_named or placed.is_cut_off:
            self._say(f"{placed.name} answers again")
        placed.asking, placed.is_named, placed.is_cut_off = None, False, False

    def silent(self) -> list[str]:
        """A sentence for every part that runs and does not answer."""
        return [placed.silence() for placed in self._parts.values() if placed.silent_s > STATUS_TIMEOUT_S]

    def _silent_besides(self, failed: Placed) -> list[str]:
        """Of the others: what failed may have waited for one of them."""
        return [placed.silence() for placed in self._parts.values() if placed is not failed and placed.silent_s > 0]

    def statuses(self, name: str) -> list[dict[str, Any]]:
        """The last account of every incarnation of a part, the present one included, or of one that has left."""
        if name in self._left:
            return self._left[name]
        return [*self._parts[name].earlier, self.status(name)]

    def stop(self, *names: str) -> list[str]:
        """Ask the loops to end, in the order given, all within `run.stop_timeout_s`; then end the processes.

        Returns the parts whose loops did not end, or ended with an error.
        """
        failed: list[str] = []
        lost: set[str] = set()
        """Teams of which a part has failed: the others wait for it in vain."""
        deadline = time.monotonic() + self._config.run.stop_timeout_s
        for name in names:
            placed = self._parts.pop(name, None)
            if placed is None:
                continue
            left_s = MIN_STOP_S if placed.team in lost else max(MIN_STOP_S, deadline - time.monotonic())
            try:
                if placed.running:
                    ray.get(placed.handle.stop.remote(), timeout=left_s)
                    ray.get(placed.running, timeout=left_s)
            except GetTimeoutError:
                failed.append(name)
                self._say(f"{name} did not end within {left_s:.1f} s and is killed")
            except RayError as error:
                failed.append(name)
                self._say(f"{self._explain(placed, error)} while stopping")
            if placed.team and name in failed:
                lost.add(placed.team)
            kill(placed.handle)
        return failed

    def stop_all(self) -> list[str]:
        """Stop everything, as `stop` does: the learner first, whose checkpoint the buffer must note; servers last."""
        order = {"learner": 0, "follower": 0, "sampler": 1, "evaluation": 1, "weights": 2, "buffer": 2, "curator": 3}
        return self.stop(*sorted(self._parts, key=lambda name: order[self._parts[name].kind]))

    def _explain(self, placed: Placed, error: RayError) -> str:
        log = self._log_dir / f"{placed.name}.log"
        if isinstance(error, RayTaskError):
            return f"{placed.name} failed: {type(error.cause).__name__}: {error.cause} (log: {log})"
        when = "while it was built" if placed.building else f"process {placed.pid}"
        return f"{placed.name} died ({when}; log: {log})"


def _lost_another(error: RayError) -> bool:
    """Whether a part ended because another of its team did."""
    return isinstance(error, RayTaskError) and isinstance(error.cause, RankError)


def _await_end(pids: Sequence[int]) -> None:
    """Return once processes that were killed are gone; after KILLED_S in any case."""
    deadline = time.monotonic() + KILLED_S
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)


def kill(handle: Any) -> None:
    """End an actor's process without restart."""
    ray.kill(handle, no_restart=True)
