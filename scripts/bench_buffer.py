"""What the buffer costs, measured on its real loop; sockets alone are left out: requests come from a list.

durable  From the received bytes of a group to its acknowledgement, validation, journal and ledger included, against a
         write of the same bytes and of a log row of the same size with the same two fsyncs. 8 rollouts of 256 and of
         4096 tokens, one group a commit and 16 groups a commit. The two take turns; figures are lower deciles, so that
         what else the machine does counts little. The share is the bare write's time over ours. Goal
         0.8 with one group a commit.
encoded  The same with the sampler's encoding before it, against pickle of Python lists and of numpy arrays: dumps,
         loads (the buffer must look into a group before it takes it), the write and its two fsyncs. Goal: faster than
         lists.
memory   Resident memory over many groups of which 3 in 4 are trained, with checkpoints, outcomes that the curator
         takes, retention and new logs. Goal: flat over the last 100,000. Before them the buffer comes to remember as
         many inserts as it ever will, and the allocator to keep what folds, snapshots and records of a moment take:
         that ends after about 90,000 groups. On a disk in memory where there is one: the disk is not measured here.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from curator.client import Positioned, Reported
from curator.wire import Message, Request
from stream_grpo.buffer.process import BufferProcess
from stream_grpo.config_stream import Buffer, Stream
from stream_grpo.transport.codec import encode_group
from stream_grpo.types import Decision, EndReason, PolicyVersion, RewardResult, Rollout, RolloutGroup

GROUP_SIZE, PROMPT_TOKENS = 8, 64
LENGTHS = (256, 4096)
GOAL_SHARE = 0.8
GROUPS_PER_STEP = 64
NUM_LINES = 20
SETTLED_GROUPS = 100_000


class Requests:
    """A server whose requests come from a list, and which keeps the last answers."""

    address = "memory"
    refused: Mapping[str, int] = {}

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.answered_at = 0.0
        self.answers: list[tuple[str, dict[str, Any], Sequence[bytes]]] = []
        self._count = 0

    def post(self, kind: str, fields: dict[str, Any], body: tuple[bytes, ...] = ()) -> None:
        """Hand a request in."""
        self._count += 1
        self.waiting.append(Request(b"bench", Message(kind, fields, body, str(self._count))))

    def receive(self, timeout_s: float) -> Request | None:
        """The next one, without waiting."""
        return self.waiting.pop(0) if self.waiting else None

    def reply(self, request: Request, kind: str, fields: Any = None, body: Any = (), *, remember: bool = True) -> None:
        """Take an answer; one that refuses ends the measurement."""
        if kind == "error":
            raise RuntimeError(fields["reason"])
        self.answers.append((kind, fields or {}, body))
        self.answered_at = time.perf_counter()


class Durable:
    """A curator that has on disk whatever it is told."""

    has_credit = True

    def __init__(self) -> None:
        self._answers: list[Any] = []
        self._next = 0

    def post_report(self, outcomes: Any) -> None:
        """Take outcomes."""
        self._next = outcomes[-1].sequence + 1
        self._answers.append(Reported("", self._next))

    def post_position(self) -> None:
        """Be asked which were taken."""
        self._answers.append(Positioned("", self._next, self._next))

    def poll(self, timeout_s: float) -> list[Any]:
        """The answers to both."""
        answers, self._answers = self._answers, []
        return answers


class Driven:
    """The buffer's real loop, turned by hand."""

    def __init__(self, directory: Path, **buffer: Any) -> None:
        self.requests = Requests()
        stream = Stream(groups_per_step=GROUPS_PER_STEP, max_policy_age=4, max_groups_without_signal=1 << 40)
        self.process = BufferProcess(
            self.requests,  # type: ignore[arg-type]
            Durable(),  # type: ignore[arg-type]
            directory=directory,
            stream=stream,
            buffer=Buffer(group_commit_s=1.0, min_free_bytes=0, **buffer),
            seed=0,
            vocab_size=50_000,
        )
        self.ask("hello", {"sampler_id": "s0"})
        self.ask("start", {"version": [0, 0], "forks": {}})

    def ask(self, kind: str, fields: dict[str, Any]) -> tuple[dict[str, Any], Sequence[bytes]]:
        """One request, and its answer."""
        self.requests.post(kind, fields)
        ((_, answer, body),) = self.answered(1)
        return answer, body

    def answered(self, count: int) -> list[Any]:
        """Turn the loop until there are so many answers."""
        while len(self.requests.answers) < count:
            self.process.turn()
        answers, self.requests.answers = self.requests.answers, []
        return answers

    def tickets(self, count: int, version: PolicyVersion) -> list[dict[str, Any]]:
        """Tickets for weights of this version."""
        fields = {"sampler_id": "s0", "version": list(version), "num_wanted": count, "problems": {}}
        tickets: list[dict[str, Any]] = self.ask("tickets", fields)[0]["tickets"]
        return tickets

    def insert(self, records: Sequence[bytes]) -> float:
        """Hand records over; when the last answer was given, by the clock of `perf_counter`."""
        for data in records:
            self.requests.post("insert", {}, (data,))
        self.answered(len(records))
        return self.requests.answered_at


def make_group(group_id: str, num_tokens: int, rewards: Sequence[float], step: int = 0) -> RolloutGroup:
    """Answers of `num_tokens` tokens; weights change in the middle of each."""
    rng = np.random.default_rng(len(rewards))
    length = PROMPT_TOKENS + num_tokens
    mask = np.arange(length) >= PROMPT_TOKENS
    steps = np.where(np.arange(length) < length * 3 // 4, max(step - 1, 0), step)
    rollouts = [
        Rollout(
            token_ids=rng.integers(0, 50_000, length, dtype=np.int32),
            num_prompt_tokens=PROMPT_TOKENS,
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
            version_branch=np.where(mask, 0, -1).astype(np.int32),
            version_step=np.where(mask, steps, -1).astype(np.int32),
            turn=np.zeros(length, np.int16),
            end_reason=EndReason.EOS,
            seed=seed,
            reward=RewardResult(
                decision=Decision.PASS if reward else Decision.FAIL, reward=reward, verifier="math",
                verifier_version="1", evidence="extracted 42, gold 41: not equal",
            ),
        )
        for seed, reward in enumerate(rewards)
    ]  # fmt: skip
    return RolloutGroup(
        group_id=group_id, owner_epoch=0, problem_id=f"problem-{group_id}", domain="algebra", sampler_id="s0",
        ticket_step=step, config_hash="c", dispatched_at_s=1.0, finished_at_s=3.0, rollouts=tuple(rollouts),
    )  # fmt: skip


@contextmanager
def bare_files(directory: Path) -> Any:
    """Writes of a record and of a row, a file and an fsync each: what the journal cannot do without."""
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
    records, rows = (os.open(directory / name, flags) for name in ("records", "rows"))

    def write(data: bytes, row: bytes) -> None:
        for file, part in ((records, data), (rows, row)):
            os.write(file, part)
            os.fsync(file)

    yield write
    os.close(records)
    os.close(rows)


def seconds(work: Callable[[], float | None]) -> float:
    """Until the work is done, or the moment that it returns."""
    begun = time.perf_counter()
    ended = work()
    return (ended or time.perf_counter()) - begun


def measure(directory: Path, num_tokens: int, at_once: int, repeats: int, encoded: bool) -> dict[str, float]:
    """Lower deciles in milliseconds a group; groups without signal, which end at once: nothing piles up."""
    ways: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=directory) as name, bare_files(Path(name)) as write:
        driven = Driven(Path(name) / "journal")
        template = make_group("-", num_tokens, [1.0] * GROUP_SIZE)
        for _ in range(repeats):
            ids = [ticket["group_id"] for ticket in driven.tickets(at_once, PolicyVersion(0, 0))]
            groups = [replace(template, group_id=group_id) for group_id in ids]
            records = [encode_group(group) for group in groups]
            log = driven.process._journal._log
            before = log.size
            if encoded:
                times = {"ours": seconds(partial(encode_and_insert, driven, groups))}
                row = b"x" * (log.size - before)
                for kind, of in (("lists", as_lists), ("numpy", as_arrays)):
                    plain = [of(group) for group in groups]
                    times[kind] = seconds(partial(pickle_and_write, write, plain, row))
            else:
                times = {"ours": seconds(partial(driven.insert, records))}
                times["bare"] = seconds(partial(write, b"".join(records), b"x" * (log.size - before)))
            for way, taken in times.items():
                ways.setdefault(way, []).append(taken / at_once * 1e3)
        driven.process.close()
    return {way: float(np.quantile(taken, 0.1)) for way, taken in ways.items()}


def encode_and_insert(driven: Driven, groups: Sequence[RolloutGroup]) -> float:
    """What a sampler does to its groups, and what the buffer does then."""
    return driven.insert([encode_group(group) for group in groups])


def pickle_and_write(write: Callable[[bytes, bytes], None], groups: Sequence[Any], row: bytes) -> None:
    """Each group dumped, loaded again where it is taken, and written."""
    parts = [pickle.dumps(group, protocol=5) for group in groups]
    for part in parts:
        pickle.loads(part)
    write(b"".join(parts), row)


def as_arrays(group: RolloutGroup) -> dict[str, Any]:
    """The group as plain Python, its tokens as numpy arrays."""
    fields = {name: getattr(group, name) for name in group.__slots__ if name != "rollouts"}
    return fields | {"rollouts": [{name: getattr(r, name) for name in r.__slots__} for r in group.rollouts]}


def as_lists(group: RolloutGroup) -> dict[str, Any]:
    """The group as plain Python, its tokens as lists."""
    plain = as_arrays(group)
    for rollout in plain["rollouts"]:
        rollout |= {key: value.tolist() for key, value in rollout.items() if isinstance(value, np.ndarray)}
    return plain


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory(directory: Path, num_groups: int, report: Callable[[str], None]) -> dict[str, Any]:
    """Resident memory along `num_groups` groups."""
    series: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory(dir=directory) as name:
        driven = Driven(Path(name), retain_bytes=32 << 20, segment_bytes=8 << 20, log_bytes=4 << 20)
        spread = [1.0, 0.0] * (GROUP_SIZE // 2)
        step, made, every = 0, 0, max(num_groups // NUM_LINES, 1)
        while made < num_groups:
            version = PolicyVersion(0, step)
            tickets = driven.tickets(GROUPS_PER_STEP * 4 // 3, version)
            # Ids have one length: a record of another group is one with other ids in it.
            with_signal, without = (
                encode_group(make_group("g00000000", 16, rewards, step)) for rewards in (spread, [1.0] * GROUP_SIZE)
            )
            driven.insert(
                [
                    (without if number % 4 == 3 else with_signal).replace(b"g00000000", ticket["group_id"].encode())
                    for number, ticket in enumerate(tickets)
                ]
            )
            made += len(tickets)
            step = train(driven, step)
            if made // every > len(series) - 1:
                gc.collect()
                series.append((made, resident_mib()))
                status = driven.process.status()
                report(
                    f"{made:>9,} groups  {series[-1][1]:7.1f} MiB resident  {status['bytes_on_disk'] >> 20:>4} MiB on "
                    f"disk in {status['segments_on_disk']} segments, log {status['log_number']}"
                )
        closes = driven.process.status()["ledger"]["closes"]
        driven.process.close()
    settled = [mib for groups, mib in series if groups >= made - SETTLED_GROUPS]
    return {"series": series, "growth_mib": settled[-1] - settled[0], "ledger_closes": closes}


def train(driven: Driven, step: int) -> int:
    """The step from `step` where there is a batch, with a checkpoint every tenth; returns where the learner is."""
    _, body = driven.ask("lease", {"version": [0, step], "num_groups": GROUPS_PER_STEP})
    if not body:
        return step
    ids = [held.group_id for held in driven.process._book.stock.leased()]
    tokens = {group_id: {"trained": GROUP_SIZE * 16} for group_id in ids}
    driven.ask("trained", {"version": [0, step + 1], "group_ids": ids, "tokens": tokens})
    if step % 10 == 9:
        driven.ask("checkpointed", {"version": [0, step - 9]})
    return step + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a last line with all figures")
    parser.add_argument("--repeats", type=int, default=200, help="commits of each kind")
    parser.add_argument("--groups", type=int, default=200_000, help="groups of the memory measurement")
    parser.add_argument("--dir", type=Path, default=Path(), help="where the disk is that is measured")
    kinds = ("durable", "encoded", "memory")
    parser.add_argument("--only", nargs="*", choices=kinds, default=kinds, help="these measurements alone")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for kind in ("durable", "encoded"):
        for num_tokens in LENGTHS if kind in options.only else ():
            for at_once in (1, 16):
                found = measure(options.dir, num_tokens, at_once, options.repeats, encoded=kind == "encoded")
                print(line_of(kind, num_tokens, at_once, found), flush=True)
                figures[f"{kind}_{GROUP_SIZE}x{num_tokens}_{at_once}"] = found
    if "memory" in options.only:
        in_memory = Path("/dev/shm")
        directory = in_memory if in_memory.is_dir() else options.dir
        found = memory(directory, options.groups, lambda line: print(line, flush=True))
        print(f"memory   grows by {found['growth_mib']:.1f} MiB over the last {SETTLED_GROUPS:,} groups")
        figures["memory"] = found
    if options.json:
        print(json.dumps(figures))


def line_of(kind: str, num_tokens: int, at_once: int, found: dict[str, float]) -> str:
    """A measurement in words; milliseconds a group."""
    head = f"{kind}  {GROUP_SIZE} x {num_tokens:>4}, {at_once:>2} a commit: ours {found['ours']:7.3f} ms a group"
    if kind == "durable":
        found["share"] = found["bare"] / found["ours"]
        is_met = found["share"] >= GOAL_SHARE
        tail = f"bare write {found['bare']:7.3f}, share {found['share']:.2f}"
    else:
        is_met = found["ours"] < found["lists"]
        tail = f"pickled lists {found['lists']:7.3f}, pickled arrays {found['numpy']:7.3f}"
    return f"{head}, {tail}{'' if at_once > 1 else '  goal met' if is_met else '  GOAL MISSED'}"


if __name__ == "__main__":
    main()
