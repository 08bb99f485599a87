"""Problem and Outcome: the two records that cross the border of the curator, and their Arrow schemas.

Together with `client.py` and `wire.py` this is all that a trainer imports of the curator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import pyarrow as pa

OFFLINE_PASS_RATE = "offline_pass_rate"
"""Key of a problem's `extra`: the share of passes, 0 to 1, that somebody measured before; a prior of its difficulty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One row of the pool. Example: id `add-2/17+25`, prompt `17+25=`, answer `42`, verifier `exact`."""

    problem_id: str
    prompt: str | tuple[Mapping[str, str], ...]
    """Text, or chat messages of role and content."""
    answer: str
    verifier: str
    """A name, or the text of a list of several, see `verifier_items`."""
    domain: str = ""
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Every other column the row had, as plain values; handed to the verifier unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierItem:
    """One of several verifiers that a row names."""

    verifier: str
    weight: float | None = None
    """Of its reward in the sum; None: the same for all."""
    gate: bool = False
    """Whether it must pass, and adds nothing."""


_ITEM_FIELDS = tuple(VerifierItem.__dataclass_fields__)


def verifier_items(text: str) -> tuple[VerifierItem, ...] | None:
    """The verifiers of a field that holds the JSON of a list; None where it holds one name.

    An entry is a name, or an object of `verifier` and perhaps `weight` or `gate`. Raises ValueError naming the entry
    for a list that is none, with nothing to score by, with a verifier twice, or with weights for some of its scores.
    """
    if not text.lstrip().startswith("["):
        return None
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not the JSON of a list: {error}") from None
    items = tuple(_verifier_item(place, entry) for place, entry in enumerate(entries))
    scores = [item for item in items if not item.gate]
    if not scores:
        raise ValueError(f"{'only gates' if items else 'an empty list'}: one verifier at least must make the reward")
    names = [item.verifier for item in items]
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise ValueError(f"verifier {twice[0]!r} stands in it twice; once is enough")
    if len({item.weight is None for item in scores}) > 1:
        raise ValueError("some have a weight and some have none; give all that are no gates one, or none of them")
    return items


def verifier_text(items: Sequence[VerifierItem]) -> str:
    """The field that `verifier_items` reads back; one name where that says it all."""
    plain = [_plain_item(item) for item in items]
    return plain[0] if len(plain) == 1 and isinstance(plain[0], str) else json.dumps(plain, ensure_ascii=False)


def _plain_item(item: VerifierItem) -> str | dict[str, Any]:
    given = {"weight": item.weight} if item.weight is not None else {"gate": True} if item.gate else {}
    return {"verifier": item.verifier, **given} if given else item.verifier


def _verifier_item(place: int, entry: Any) -> VerifierItem:
    row = {"verifier": entry} if isinstance(entry, str) else entry
    if not isinstance(row, dict):
        raise ValueError(f"[{place}] = {entry!r}: expected a name, or an object of {', '.join(_ITEM_FIELDS)}")
    if odd := sorted(row.keys() - set(_ITEM_FIELDS)):
        raise ValueError(f"[{place}].{odd[0]}: unknown; known: {', '.join(_ITEM_FIELDS)}")
    name, weight, gate = row.get("verifier"), row.get("weight"), row.get("gate")
    gate = False if gate is None else gate  # a table has every field in every row
    if not isinstance(name, str) or not name.strip() or name.lstrip().startswith(("[", "compose:")):
        raise ValueError(f"[{place}].verifier = {name!r}: expected the name of one verifier")
    if not isinstance(gate, bool):
        raise ValueError(f"[{place}].gate = {gate!r}: expected true or false")
    if weight is None:
        return VerifierItem(verifier=name.strip(), gate=gate)
    if gate:
        raise ValueError(f"[{place}].weight = {weight!r}: a gate only passes or fails; leave the weight out")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ValueError(f"[{place}].weight = {weight!r}: expected a number above 0")
    return VerifierItem(verifier=name.strip(), weight=float(weight))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A problem chosen for one group, and how it was chosen."""

    group_id: str
    problem: Problem
    probability: float
    """Probability of this problem at this draw, so that weights can be corrected."""
    expected_signal: float
    """Predicted probability that the group's rewards differ."""
    group_size: int = 0
    """Rollouts of the group; 0: as many as whoever samples it gives every group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the curator learns from a group, once the group is durable."""

    sequence: int
    """Place in the buffer's journal order; 0, 1, 2, ... without gaps within a run."""
    group_id: str
    problem_id: str
    domain: str
    num_passed: int
    num_failed: int
    num_unscored: int
    mean_reward: float
    """Of the scored rollouts; NaN where there is none."""
    reward_spread: float
    """Largest minus smallest reward of the scored rollouts; 0 where there is none."""
    num_truncated: int
    branch: int
    """Branch of the newest version that sampled a token of the group."""
    min_step: int
    max_step: int
    mean_step: float
    """Token-weighted mean step of the versions that sampled it."""
    num_tokens: int
    """Sampled tokens of all rollouts."""
    seconds: float
    """From dispatch to the end of the last rollout."""
    fate: str
    """How the buffer took it: accepted, no_signal, invalid, stale or refused; `requeued`: pick its problem next."""


PROBLEM_SCHEMA = pa.schema(
    [
        pa.field("problem_id", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("prompt_is_messages", pa.bool_(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("verifier", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("extra", pa.string(), nullable=False),
    ],
    metadata={"schema": "curator.problem", "schema_version": "1"},
)
"""A problem as a row. `prompt` holds JSON where `prompt_is_messages`; `extra` always holds a JSON object."""

PICK_SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        *PROBLEM_SCHEMA,
        pa.field("probability", pa.float64(), nullable=False),
        pa.field("expected_signal", pa.float64(), nullable=False),
        pa.field("group_size", pa.int32(), nullable=False),
    ],
    metadata={"schema": "curator.pick", "schema_version": "2"},
)

OUTCOME_SCHEMA = pa.schema(
    [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("problem_id", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("num_passed", pa.int32(), nullable=False),
        pa.field("num_failed", pa.int32(), nullable=False),
        pa.field("num_unscored", pa.int32(), nullable=False),
        pa.field("mean_reward", pa.float64(), nullable=False),
        pa.field("reward_spread", pa.float64(), nullable=False),
        pa.field("num_truncated", pa.int32(), nullable=False),
        pa.field("branch", pa.int32(), nullable=False),
        pa.field("min_step", pa.int32(), nullable=False),
        pa.field("max_step", pa.int32(), nullable=False),
        pa.field("mean_step", pa.float64(), nullable=False),
        pa.field("num_tokens", pa.int64(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
        pa.field("fate", pa.string(), nullable=False),
    ],
    metadata={"schema": "curator.outcome", "schema_version": "1"},
)


_EXTRA_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True)


def problem_row(problem: Problem) -> dict[str, Any]:
    """A problem as the plain values of one row of PROBLEM_SCHEMA."""
    is_text = isinstance(problem.prompt, str)
    return {
        "problem_id": problem.problem_id,
        "prompt": problem.prompt if is_text else json.dumps(list(problem.prompt), ensure_ascii=False),
        "prompt_is_messages": not is_text,
        "answer": problem.answer,
        "verifier": problem.verifier,
        "domain": problem.domain,
        "source": problem.source,
        "extra": _EXTRA_ENCODER.encode(problem.extra if isinstance(problem.extra, dict) else dict(problem.extra)),
    }


def problem_from_row(row: Mapping[str, Any]) -> Problem:
    """The inverse of `problem_row`; further columns of the row are passed over."""
    prompt = tuple(json.loads(row["prompt"])) if row["prompt_is_messages"] else row["prompt"]
    return Problem(
        problem_id=row["problem_id"],
        prompt=prompt,
        answer=row["answer"],
        verifier=row["verifier"],
        domain=row["domain"],
        source=row["source"],
        extra=json.loads(row["extra"]),
    )


def problems_to_batch(problems: Iterable[Problem]) -> pa.RecordBatch:
    """Problems as one record batch of PROBLEM_SCHEMA."""
    return pa.RecordBatch.from_pylist([problem_row(p) for p in problems], schema=PROBLEM_SCHEMA)


def picks_to_batch(picks: Iterable[Pick]) -> pa.RecordBatch:
    """Picks as one record batch of PICK_SCHEMA."""
    rows = [
        {
            "group_id": pick.group_id,
            **problem_row(pick.problem),
            "probability": pick.probability,
            "expected_signal": pick.expected_signal,
            "group_size": pick.group_size,
        }
        for pick in picks
    ]
    return pa.RecordBatch.from_pylist(rows, schema=PICK_SCHEMA)


def picks_from_batch(batch: pa.RecordBatch) -> list[Pick]:
    """The inverse of `picks_to_batch`."""
    return [
        Pick(
            group_id=row["group_id"],
            problem=problem_from_row(row),
            probability=row["probability"],
            expected_signal=row["expected_signal"],
            group_size=row["group_size"],
        )
        for row in batch.to_pylist()
    ]


def outcomes_to_batch(outcomes: Iterable[Outcome]) -> pa.RecordBatch:
    """Outcomes as one record batch of OUTCOME_SCHEMA."""
    # By columns: Arrow takes several times as long over rows.
    rows = list(map(attrgetter(*OUTCOME_SCHEMA.names), outcomes))
    columns = zip(*rows, strict=True) if rows else [()] * len(OUTCOME_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, OUTCOME_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=OUTCOME_SCHEMA)


def outcomes_from_batch(batch: pa.RecordBatch) -> list[Outcome]:
    """The inverse of `outcomes_to_batch`."""
    names = OUTCOME_SCHEMA.names
    rows = zip(*(batch[name].to_pylist() for name in names), strict=True)
    return [Outcome(**dict(zip(names, row, strict=True))) for row in rows]


def batch_to_bytes(batch: pa.RecordBatch) -> bytes:
    """One batch as a complete Arrow IPC stream, schema included."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def batch_from_bytes(data: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """Read `batch_to_bytes` back.

    Raises ValueError where the bytes are no Arrow stream of one batch, or of another schema or schema version.
    """
    try:
        with pa.ipc.open_stream(data) as reader:
            found, batches = reader.schema, list(reader)
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        raise ValueError(f"not an Arrow stream: {error}") from error
    if not found.equals(schema, check_metadata=True):
        differing = _differing(found, schema)
        raise ValueError(
            f"expected schema {schema.metadata}, received {found.metadata}; columns that differ: {differing}"
        )
    if len(batches) != 1:
        raise ValueError(f"expected one record batch, received {len(batches)}")
    return batches[0]


def _differing(found: pa.Schema, expected: pa.Schema) -> Sequence[str]:
    return sorted(set(found.names) ^ set(expected.names))
