"""Recounts a run from its journal and its checkpoints: what was lost, trained twice or too old, and every token.

It imports pyarrow and the standard library, nothing of the trainer: what it says rests on what is on disk alone. The
words are those of ARCHITECTURE.md. Use: python audit.py RUN [--witness FILE]... [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

Version = tuple[int, int]
"""Branch and step."""
Place = tuple[int, int]
"""Segment and offset of a record."""
Row = dict[str, Any]
"""A transition: one row of the log."""
ENDS = ("trained", "stale", "no_signal", "invalid")
IN_FLIGHT = ("ticketed", "partial", "rescored")
STATES = (*IN_FLIGHT, "accepted", "leased", "restored", *ENDS)
USES = ("reused", "undone")
"""Of a group that was trained: a step trained on it once more, a restore took that back."""
NEVER_VALID = ("abort", "error", "partial", "model_timeout", "env_error")
"""Ends of rollouts that are never trained on, whatever their reward."""


class Rollout(NamedTuple):
    """What a record says of one of its rollouts."""

    num_tokens: int
    """Sampled tokens: those of the loss mask, and the trunk of a branching group in the rollout that sampled it."""
    num_targets: int
    """Of these the ones that may be trained: those of the loss mask."""
    versions: frozenset[Version]
    """That sampled them."""
    is_valid: bool
    """Whether it has a reward and ended as one that may be trained on."""


class Record(NamedTuple):
    """What a group's own record says of it."""

    rollouts: tuple[Rollout, ...]

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all rollouts."""
        return sum(rollout.num_tokens for rollout in self.rollouts)

    @property
    def versions(self) -> frozenset[Version]:
        """That sampled any of them."""
        return frozenset().union(*(rollout.versions for rollout in self.rollouts))


class Rules(NamedTuple):
    """What the run's configuration says of ages and uses."""

    max_policy_age: int = 4
    too_old: str = "wait"
    max_uses: int = 1
    reuse_share: float = 0.25
    groups_per_step: int = 32

    @property
    def reused_per_step(self) -> int:
        """Groups of a step, at most, that were trained on before."""
        return math.floor(self.reuse_share * self.groups_per_step + 1e-9) if self.max_uses > 1 else 0


@dataclass
class Audit:
    """What was found. The first four are what must not be."""

    lost: int = 0
    """Groups that were acknowledged and are not there, not whole, or trained by a model that was given up for good."""
    trained_twice: int = 0
    """Trainings of a group, along the branches that lead to the final model, beyond its first and the further uses that
    `stream.max_uses` and `stream.reuse_share` allow."""
    age_violations: int = 0
    """Trainings of a group on a token older than `stream.max_policy_age`, on any branch. With `stream.too_old` =
    baseline_only a step may have such a token and not train on it."""
    steps_missing: int = 0
    """Steps of the final model without a group."""
    ledger_closes: bool = True
    """Whether every token has one fate, and the trainer's own account says the same."""
    groups_accepted: int = 0
    groups_trained: int = 0
    """Groups of the final model."""
    final: Version = (0, 0)
    """The newest checkpoint: branch and step."""
    num_branches: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    reused: dict[str, int] = field(default_factory=lambda: {"uses": 0, "tokens": 0})
    """Further uses that no restore took back, and the tokens they trained on."""
    findings: list[str] = field(default_factory=list)
    """A sentence for everything that is wrong."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


# -- reading ----------------------------------------------------------------------------------------------------------


def read_log(journal: Path) -> list[Row]:
    """Every committed transition, oldest first. A commit that a kill cut short was never acknowledged."""
    rows: list[Row] = []
    for path in sorted(journal.glob("transitions*.arrow")):
        rows += [row for batch in _batches(path) for row in batch.to_pylist()]
    return rows


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.ipc.open_stream(pa.py_buffer(path.read_bytes())) as stream:
        while True:
            try:
                yield stream.read_next_batch()
            except (StopIteration, pa.ArrowInvalid, OSError):
                return


def read_records(journal: Path, rows: Iterable[Row]) -> tuple[dict[Place, Record], list[str]]:
    """Every record that a row names, by its place; and a sentence for each that is missing or damaged."""
    segments: dict[int, bytes] = {}
    records, damage = {}, []
    for row in rows:
        if not row["length"]:
            continue
        number = row["segment"]
        if number not in segments:
            path = journal / f"segment-{number:06d}.arrow"
            segments[number] = path.read_bytes() if path.exists() else b""
        data = segments[number][row["offset"] : row["offset"] + row["length"]]
        if len(data) < row["length"] or zlib.crc32(data) != row["crc32"]:
            damage.append(f"{row['group_id']}: its record in segment {number} is missing or not what was written")
        else:
            records[_place(row)] = _record(segments[number], data)
    return records, damage


def _place(row: Row) -> Place:
    return row["segment"], row["offset"]


def _record(segment: bytes, data: bytes) -> Record:
    schema = pa.ipc.open_stream(pa.py_buffer(segment)).schema
    batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
    names = ("loss_mask", "version_branch", "version_step", "reward", "end_reason")
    columns = [batch.column(name).to_pylist() for name in names]
    return Record(tuple(_rollout(*values) for values in zip(*columns, strict=True)))


def _rollout(mask: list[bool], branches: list[int], steps: list[int], reward: float | None, end_reason: str) -> Rollout:
    sampled = [(branch, step) for kept, branch, step in zip(mask, branches, steps, strict=True) if kept or step >= 0]
    num_targets = sum(mask)
    is_valid = reward is not None and end_reason not in NEVER_VALID and num_targets > 0
    return Rollout(len(sampled), num_targets, frozenset(sampled), is_valid)


def read_rules(path: Path) -> Rules:
    """The rules of a run, by its configuration; the trainer's defaults where that has no value."""
    stream = tomllib.loads(path.read_text()).get("stream", {})
    return Rules(**{name: stream[name] for name in Rules._fields if name in stream})


def forks_of(rows: Iterable[Row]) -> dict[int, Version]:
    """Where every branch above 0 forks, by the rows of the starts."""
    forks: dict[int, Version] = {}
    for row in rows:
        if row["kind"] == "started":
            forks |= {int(branch): (fork[0], fork[1]) for branch, fork in json.loads(row["reason"]).items()}
    return forks


def read_checkpoints(folder: Path) -> tuple[list[Version], list[str]]:
    """The versions of the visible checkpoints, oldest first; and a sentence for each file that is not as written."""
    versions, damage = [], []
    for path in folder.glob("checkpoint-*"):
        manifest = json.loads((path / "manifest.json").read_bytes())
        versions.append((manifest["branch"], manifest["step"]))
        for name, entry in manifest["files"].items():
            file = path / name
            if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != entry["sha256"]:
                damage.append(f"{path.name}: {name} is not what its manifest says")
    return sorted(versions), damage


# -- versions ---------------------------------------------------------------------------------------------------------


def reach(version: Version, forks: Mapping[int, Version]) -> dict[int, int]:
    """The branches that a version came by, each with the last step on it that the version contains."""
    branch, step = version
    found = {branch: step}
    while branch > 0:
        branch, step = forks[branch]
        found[branch] = step
    return found


def age(version: Version, learner: Version, forks: Mapping[int, Version]) -> int:
    """Steps from a version back to the last one it has in common with the learner, and from there to the learner."""
    mine, its = reach(version, forks), reach(learner, forks)
    shared = max(mine.keys() & its.keys())
    ancestor = min(mine[shared], its[shared])
    return version[1] + learner[1] - 2 * ancestor


# -- counting ---------------------------------------------------------------------------------------------------------


def audit(run: Path, witnessed: Iterable[str] = ()) -> Audit:
    """Recount a run. `witnessed`: ids of groups that somebody outside saw acknowledged."""
    rows = read_log(run / "journal")
    records, damage = read_records(run / "journal", rows)
    versions, damaged_checkpoints = read_checkpoints(run / "checkpoints")
    forks = forks_of(rows)
    rules = read_rules(run / "config.toml")
    found = Audit(final=versions[-1] if versions else (0, 0), num_branches=len(forks) + 1)
    on_path = reach(found.final, forks)
    by_group, uses = _of_groups(rows, STATES), _of_groups(rows, USES)
    found.groups_accepted = sum(row["kind"] == "accepted" for row in rows)
    _count_lost(found, by_group, on_path, [*damage, *_unwitnessed(by_group, witnessed), *_gaps(by_group)])
    _count_trained(found, by_group, on_path)
    _count_uses(found, by_group, uses, on_path, rules)
    _count_ages(found, _of_groups(rows, (*STATES, *USES)), records, forks, rules)
    _count_tokens(found, rows, by_group, records)
    _compare_account(found, run)
    _compare_model(found, run, _trainings(by_group, uses, on_path))
    found.findings += damaged_checkpoints
    return found


def _of_groups(rows: Iterable[Row], kinds: Sequence[str]) -> dict[str, list[Row]]:
    """The rows of some kinds by group."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] in kinds:
            found.setdefault(row["group_id"], []).append(row)
    return found


def _is_on(path: Mapping[int, int], row: Row) -> bool:
    return bool(row["step"] <= path.get(row["branch"], -1))


def _is_trained(path: Mapping[int, int], row: Row) -> bool:
    return row["kind"] == "trained" and _is_on(path, row)


def _unwitnessed(by_group: Mapping[str, Sequence[Row]], witnessed: Iterable[str]) -> list[str]:
    return [f"{name}: was acknowledged and is not in the journal" for name in witnessed if not _has(by_group, name)]


def _has(by_group: Mapping[str, Sequence[Row]], group_id: str) -> bool:
    return any(row["length"] for row in by_group.get(group_id, ()) if row["kind"] not in IN_FLIGHT)


def _gaps(by_group: Mapping[str, Sequence[Row]]) -> list[str]:
    """Tickets are numbered from 1 on without gaps."""
    numbers = {int(group_id[1:]) for group_id in by_group}
    missing = sorted(set(range(1, max(numbers, default=0) + 1)) - numbers)
    return [f"g{number:08d}: the log does not have this ticket" for number in missing]


def _count_lost(
    found: Audit, by_group: Mapping[str, Sequence[Row]], on_path: Mapping[int, int], sentences: Sequence[str]
) -> None:
    given_up = [
        f"{group_id}: its last state is trained by {rows[-1]['branch']}.{rows[-1]['step']}, which the final model does "
        f"not contain"
        for group_id, rows in by_group.items()
        if rows[-1]["kind"] == "trained" and not _is_on(on_path, rows[-1])
    ]
    found.lost = len({sentence.partition(":")[0] for sentence in (*sentences, *given_up)})
    found.findings += [*sentences, *given_up]


def _count_trained(found: Audit, by_group: Mapping[str, Sequence[Row]], on_path: Mapping[int, int]) -> None:
    steps: set[int] = set()
    for group_id, rows in by_group.items():
        trained = [row for row in rows if _is_trained(on_path, row)]
        steps |= {row["step"] for row in trained}
        found.groups_trained += bool(trained)
        if len(trained) > 1:
            found.trained_twice += len(trained) - 1
            found.findings.append(f"{group_id}: trained by {[(row['branch'], row['step']) for row in trained]}")
    missing = sorted(set(range(1, found.final[1] + 1)) - steps)
    found.steps_missing = len(missing)
    found.findings += [f"step {step} of the final model has no group" for step in missing]


def _standing(rows: Iterable[Row]) -> tuple[list[Row], list[Version]]:
    """Further uses of a group that were not taken back, and versions that were taken back without being there."""
    standing: list[Row] = []
    unknown = []
    for row in rows:
        if row["kind"] == "reused":
            standing.append(row)
            continue
        undone = [use for use in standing if _version(use) == _version(row)]
        standing = [use for use in standing if use not in undone]
        unknown += [] if undone else [_version(row)]
    return standing, unknown


def _version(row: Row) -> Version:
    return row["branch"], row["step"]


def _count_uses(
    found: Audit,
    by_group: Mapping[str, Sequence[Row]],
    uses: Mapping[str, Sequence[Row]],
    on_path: Mapping[int, int],
    rules: Rules,
) -> None:
    """Further uses: within the bounds of group and step, after a first one, taken back where the model has them not."""
    by_step: Counter[Version] = Counter()
    for group_id, rows in uses.items():
        standing, unknown = _standing(rows)
        by_step.update(map(_version, standing))
        found.reused["uses"] += len(standing)
        found.reused["tokens"] += sum(row["trained_tokens"] for row in standing)
        trained = [_version(row) for row in by_group.get(group_id, ()) if _is_trained(on_path, row)]
        steps = [*trained, *(_version(row) for row in standing if _is_on(on_path, row))]
        left = [_version(row) for row in standing if not _is_on(on_path, row)]
        twice = len(steps) - min(len(set(steps)), rules.max_uses if trained else 0)
        # More than one `trained` is counted where those are.
        twice -= max(0, len(trained) - 1)
        if twice > 0:
            found.trained_twice += twice
            found.findings.append(
                f"{group_id}: used by {steps}, first by {trained}; max_uses is {rules.max_uses}, each in another step"
            )
        if left or unknown:
            found.ledger_closes = False
            found.findings.append(
                f"{group_id}: uses by {left} are in no model and were not taken back, those by {unknown} were and are "
                f"not in the log"
            )
    for version, count in by_step.items():
        if count > rules.reused_per_step:
            found.trained_twice += count - rules.reused_per_step
            found.findings.append(f"{version}: {count} groups were used again, at most {rules.reused_per_step} may be")


def _count_ages(
    found: Audit,
    history: Mapping[str, Sequence[Row]],
    records: Mapping[Place, Record],
    forks: Mapping[int, Version],
    rules: Rules,
) -> None:
    for group_id, rows in history.items():
        record = Record(())
        for row in rows:
            if row["length"]:
                record = records.get(_place(row), record)
            if row["kind"] not in ("trained", "reused"):
                continue
            start = (row["branch"], row["step"] - 1)
            oldest = max((age(version, start, forks) for version in record.versions), default=0)
            if oldest > rules.max_policy_age and row["trained_tokens"] > _num_young(record, start, forks, rules):
                found.age_violations += 1
                found.findings.append(f"{group_id}: a token {oldest} steps old was trained from {start}")


def _num_young(record: Record, start: Version, forks: Mapping[int, Version], rules: Rules) -> int:
    """Tokens that may be trained of a group with one that is too old: with baseline_only those of young rollouts."""
    if rules.too_old != "baseline_only":
        return -1
    valid = (rollout for rollout in record.rollouts if rollout.is_valid)
    return sum(
        rollout.num_targets
        for rollout in valid
        if max(age(version, start, forks) for version in rollout.versions) <= rules.max_policy_age
    )


def _count_tokens(
    found: Audit, rows: Iterable[Row], by_group: Mapping[str, Sequence[Row]], records: Mapping[Place, Record]
) -> None:
    tokens: Counter[str] = Counter()
    for row in rows:
        if row["kind"] in ("refused", "evaluated"):
            tokens["refused" if row["kind"] == "refused" else "evaluation"] += row["num_tokens"]
            tokens["generated"] += row["num_tokens"]
    for group_id, states in by_group.items():
        if not _add_group(tokens, states, records):
            found.ledger_closes = False
            found.findings.append(f"{group_id}: a row of the log has other tokens than its record")
    found.tokens = dict(tokens)
    if tokens["generated"] != sum(count for fate, count in tokens.items() if fate != "generated"):
        found.ledger_closes = False
        found.findings.append(f"the tokens do not add up: {dict(tokens)}")


def _add_group(tokens: Counter[str], states: Sequence[Row], records: Mapping[Place, Record]) -> bool:
    """Add the tokens of a group, each once, by their fate; whether every row says what its record does."""
    num_tokens, is_right = 0, True
    for row in states:
        # What a ticket that is issued again, or a record, does not have of the partial before.
        dropped = row.get("dropped_tokens", 0)
        tokens["stale"] += dropped
        tokens["generated"] += dropped
        num_tokens -= dropped
        if row["length"]:
            record = records.get(_place(row))
            num_tokens = record.num_tokens if record else 0
            is_right &= row["num_tokens"] == num_tokens
        if row["kind"] == "trained":
            is_right &= _reported(row) == num_tokens
    tokens["generated"] += num_tokens
    tokens.update(_fate(states[-1], num_tokens))
    return is_right


def _reported(row: Row) -> int:
    return int(row["trained_tokens"] + row["masked_tokens"] + row["baseline_only_tokens"])


def _fate(last: Row, num_tokens: int) -> Counter[str]:
    """What became of a group's tokens, by its last row."""
    if last["kind"] == "trained":
        return Counter({name: last[f"{name}_tokens"] for name in ("trained", "masked", "baseline_only")})
    if last["kind"] in IN_FLIGHT:
        return Counter(in_flight=num_tokens)
    return Counter({last["kind"] if last["kind"] in ENDS else "buffered": num_tokens})


def _compare_account(found: Audit, run: Path) -> None:
    """The trainer's own account, where it left one."""
    for name in ("summary.json", "ledger.json"):
        if not (run / name).exists():
            continue
        account = json.loads((run / name).read_bytes())
        theirs = account["tokens"]
        if account.get("reused", found.reused) != found.reused:
            found.ledger_closes = False
            found.findings.append(f"{name} has other further uses: recounted {found.reused}, there {account['reused']}")
        differing = {fate: (found.tokens.get(fate, 0), theirs.get(fate, 0)) for fate in {*found.tokens, *theirs}}
        differing = {fate: pair for fate, pair in differing.items() if pair[0] != pair[1]}
        if differing:
            found.ledger_closes = False
            found.findings.append(f"{name} has other tokens, (recounted, there): {differing}")


def _trainings(
    by_group: Mapping[str, Sequence[Row]], uses: Mapping[str, Sequence[Row]], on_path: Mapping[int, int]
) -> Counter[str]:
    """How often the final model was trained on each group, by the log."""
    counts: Counter[str] = Counter()
    for group_id, rows in by_group.items():
        again = [row for row in _standing(uses.get(group_id, ()))[0] if _is_on(on_path, row)]
        counts[group_id] = any(_is_trained(on_path, row) for row in rows) + len(again)
    return +counts


def _compare_model(found: Audit, run: Path, by_log: Counter[str]) -> None:
    """A model that remembers what it was trained on, as the fake one does, must have what the log says, as often."""
    path = run / "checkpoints" / f"checkpoint-{found.final[0]}.{found.final[1]}" / "engine" / "trained.json"
    if not path.exists():
        return
    trained = Counter(json.loads(path.read_bytes()))
    twice = [name for name, count in trained.items() if count > max(1, by_log[name])]
    found.trained_twice += len(twice)
    found.findings += [f"{name}: the model was trained on it {trained[name]} times" for name in twice]
    differing = sorted(by_log.keys() ^ trained.keys())
    found.findings += [f"{name}: trained by the log or by the model, not both" for name in differing]
    missed = sorted(name for name in by_log.keys() & trained.keys() if trained[name] < by_log[name])
    found.findings += [f"{name}: used {by_log[name]} times by the log, {trained[name]} by the model" for name in missed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run that is not running")
    parser.add_argument("--witness", type=Path, action="append", default=[], help="file of acknowledged group ids")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    witnessed = [name for path in arguments.witness for name in path.read_text().split()]
    found = audit(arguments.run, witnessed)
    if arguments.json:
        print(json.dumps(asdict(found)))
    else:
        print(table(found))
    return 0 if found.is_sound else 1


def table(found: Audit) -> str:
    """For people."""
    values = {
        name: value for name, value in asdict(found).items() if name not in ("findings", "tokens", "reused", "final")
    }
    values |= {"final_version": "{}.{}".format(*found.final), "tokens_generated": found.tokens.get("generated", 0)}
    values["further_uses"] = found.reused["uses"]
    lines = [f"{name.replace('_', ' '):18} {value}" for name, value in values.items()]
    return "\n".join([*lines, *found.findings[:20]])


if __name__ == "__main__":
    sys.exit(main())
