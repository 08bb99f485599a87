"""The lines of `metrics.jsonl` that the page reads, as typed records, and a reader that follows a growing file.

A long run has hundreds of megabytes of them. Of a line only its head is looked at before it is decoded, and of the
status lines, which say how things stand, some of each stretch are enough.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec

from stream_grpo.metrics import FILE_NAME

_EVENT, _STATUS = b'"event": "', b'"event": "status", "part": "'
"""How `MetricsLog` names the event of a line, and how a status begins to. Within text, quotes have a backslash."""
HEAD_BYTES = 200
"""Where the event of a line has been named."""
AGES = ("0", "1", "2", "3-4", "5-8", "9-16", "17-32", ">32")
"""The age buckets of `by_age`, in learner steps."""
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES, CHUNKS = 32 << 10, 4 << 20, 256
"""A file that is read from the start is read in about so many chunks."""
SWEEPS_A_CHUNK = 8
"""So often one status line of each part is decoded of a chunk, evenly spread, and the newest of each."""


Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""As large as any figure can be: one beyond is no number that a picture has a place for."""


class _Line(msgspec.Struct, gc=False):
    time_s: float
    source: str = ""


class TokensByFate(msgspec.Struct, gc=False):
    """Unique tokens since the run began, by fate."""

    generated: Count = 0
    trained: Count = 0
    baseline_only: Count = 0
    masked: Count = 0
    stale: Count = 0
    no_signal: Count = 0
    invalid: Count = 0
    refused: Count = 0
    evaluation: Count = 0
    buffered: Count = 0
    in_flight: Count = 0


class AgeBucket(msgspec.Struct, gc=False, frozen=True):
    """What was trained of one age bucket."""

    num_tokens: float = 0.0


class TokensByAge(msgspec.Struct, gc=False, rename={f"bucket_{number}": label for number, label in enumerate(AGES)}):
    """Trained tokens by the age bucket of their sequence."""

    bucket_0: AgeBucket = AgeBucket()
    bucket_1: AgeBucket = AgeBucket()
    bucket_2: AgeBucket = AgeBucket()
    bucket_3: AgeBucket = AgeBucket()
    bucket_4: AgeBucket = AgeBucket()
    bucket_5: AgeBucket = AgeBucket()
    bucket_6: AgeBucket = AgeBucket()
    bucket_7: AgeBucket = AgeBucket()


class StepLine(_Line, gc=False):
    """A learner step. Figures that a recipe does not have are None."""

    step: Count = 0
    reward_mean: float | None = None
    response_tokens_mean: float | None = None
    age_max: float | None = None
    age_mean: float | None = None
    age_publish_lag_mean: float | None = None
    age_in_flight_mean: float | None = None
    age_in_queue_mean: float | None = None
    num_groups: Count = 0
    num_tokens: float = 0.0
    step_s: float = 0.0
    waited_s: float = 0.0
    entropy: float | None = None
    grad_norm: float | None = None
    k3: float | None = None
    ess: float | None = None
    mask_share: float | None = None
    clip_share_high: float | None = None
    abs_log_ratio: float | None = None
    tokens: TokensByFate = msgspec.field(default_factory=TokensByFate)
    by_age: TokensByAge = msgspec.field(default_factory=TokensByAge)


class BufferStatus(_Line, gc=False, kw_only=True):
    """How the buffer stands."""

    in_flight: Count
    buffered: Count
    leased: Count
    outcomes: Count


class CuratorStatus(_Line, gc=False, kw_only=True):
    """How the pool stands: `solved`, `useful` and `too_hard` are of the problems that were sampled."""

    problems: Count
    seen: Count
    solved: Count
    useful: Count
    too_hard: Count
    picks: Count
    domain_rates: dict[str, float | None] = {}


class SamplerStatus(_Line, gc=False, kw_only=True):
    """How one sampler stands; the seconds and counts are since it started."""

    part: str
    busy_s: float
    stall_s: float
    num_tokens: Count
    num_groups_done: Count
    num_running: Count
    num_slots: Count
    idle_s: dict[str, float]
    """With nothing to sample, by what was waited for."""
    version: tuple[int, int] | None = None
    waits_for: list[str] = []


class LearnerStatus(_Line, gc=False, kw_only=True):
    """What the learner has spent its time with since it started."""

    busy_s: float
    waited_s: float
    publish_s: float
    checkpoint_s: float


class Score(msgspec.Struct, gc=False, frozen=True):
    """Of the held-out problems of a domain."""

    pass_at_1: float | None = None
    low: float | None = None
    high: float | None = None
    num_problems: float | None = None


class EvaluationLine(_Line, gc=False):
    """Held-out problems, scored with the weights of a step; by domain, and the domains that were asked for."""

    step: Count = 0
    version: tuple[int, int] = (0, 0)
    heldout: dict[str, Score] = {}


class AlarmLine(_Line, gc=False):
    """Something that a person should look at, and its likely cause."""

    step: Count | None = None
    name: str = ""
    sentence: str = ""
    cause: str = ""


class WarningLine(_Line, gc=False):
    """What a part has said."""

    message: str = ""


Status: TypeAlias = BufferStatus | CuratorStatus | SamplerStatus | LearnerStatus
Record: TypeAlias = StepLine | Status | EvaluationLine | AlarmLine | WarningLine
_Decoder: TypeAlias = "msgspec.json.Decoder[Any]"
_OF_EVENT: dict[bytes, _Decoder] = {
    b"step": msgspec.json.Decoder(StepLine),
    b"evaluation": msgspec.json.Decoder(EvaluationLine),
    b"alarm": msgspec.json.Decoder(AlarmLine),
    b"warning": msgspec.json.Decoder(WarningLine),
}
_OF_PART: dict[bytes, _Decoder] = {
    b"buffer": msgspec.json.Decoder(BufferStatus),
    b"curator": msgspec.json.Decoder(CuratorStatus),
    b"learner": msgspec.json.Decoder(LearnerStatus),
}
_SAMPLER, _OF_SAMPLER = b"sampler", msgspec.json.Decoder(SamplerStatus)
"""How the names of samplers begin. Parts of other names are none, such as further ranks of the learner."""


class _Span(NamedTuple):
    """A line of a chunk."""

    start: int
    stop: int
    decoder: _Decoder
    is_status: bool = False


class Follower:
    """Reads what has been appended to a run's metrics, whole lines only, a chunk a call."""

    def __init__(self, run_dir: Path, num_samples: int | None = None) -> None:
        """`num_samples`: read about so many small chunks of what there is, evenly spread, and pass over the rest."""
        self._path, self._num_samples, self._skip_bytes = run_dir / FILE_NAME, num_samples, 0
        self._chunk_bytes, self._is_whole = MIN_CHUNK_BYTES, True
        self.offset, self.size = 0, 0
        """Bytes that were read, and that there are."""
        self.num_unreadable = 0
        """Lines that are none: a crash cut them, or somebody else wrote them."""
        self.problem: str | None = None
        """Why nothing can be read, where that is so."""

    def look(self) -> bool:
        """See how much there is; whether it is less than was read, so that the file is another one."""
        self.problem, self.size = None, 0
        with self._noted():
            if self._path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            self.size = self._path.stat().st_size if self._path.exists() else 0
        if self._is_whole:
            left = self.size - self.offset
            self._chunk_bytes = min(max(left // CHUNKS, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
            if self._num_samples is not None:
                self._chunk_bytes = MIN_CHUNK_BYTES
                self._skip_bytes = max(0, left // self._num_samples - MIN_CHUNK_BYTES)
        self._is_whole = False
        return self.size < self.offset

    def records(self) -> list[Record] | None:
        """The records of the next chunk; None where no whole line is left, or where none can be read (`problem`)."""
        data = b""
        if self.offset < self.size:
            with self._noted():
                data = self._chunk()
        end = data.rfind(b"\n") + 1
        if not end:
            self._is_whole = True
            return None
        found = list(self._decoded(data, end))
        self.offset += end
        if self._skip_bytes:
            with self._noted():
                self._pass_over()
        return found

    def _chunk(self) -> bytes:
        with self._path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(self._chunk_bytes)
            # A line may be longer than a chunk.
            while b"\n" not in data and (more := file.read(self._chunk_bytes)):
                data += more
        return data

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep what the system says in `problem`: a page shows other runs too, which can be read."""
        try:
            yield
        except OSError as error:
            self.problem = f"{self._path.name} cannot be read: {error.strerror or error}"

    def _pass_over(self) -> None:
        """Go on at the line that begins next after what is skipped; the newest chunk is read in any case."""
        self.offset = max(self.offset, min(self.offset + self._skip_bytes, self.size - self._chunk_bytes))
        with self._path.open("rb") as file:
            file.seek(self.offset - 1)
            self.offset += len(file.readline()) - 1

    def _decoded(self, data: bytes, end: int) -> Iterator[Record]:
        view = memoryview(data)
        for start, stop, decoder, is_status in _spans(data, end):
            try:
                yield decoder.decode(view[start:stop])
            except msgspec.ValidationError:
                # A part that is being built has no figures yet. Zeros in their place would be wrong.
                self.num_unreadable += not is_status
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self.num_unreadable += 1


def _spans(data: bytes, end: int) -> list[_Span]:
    """Where the lines are that matter, in their order, and what decodes them."""
    found: list[_Span] = []
    start, find = 0, data.find
    while start < end:
        stop = find(b"\n", start)
        at = find(_EVENT, start, start + HEAD_BYTES) + len(_EVENT)
        # By far the most lines are statuses, so this is all that is done about each of them.
        if data[at : at + 2] != b"st" or data[at + 2 : at + 3] == b"e":
            decoder = _OF_EVENT.get(data[at : find(b'"', at)])
            if decoder is not None:
                found.append(_Span(start, stop, decoder))
        start = stop + 1
    for at, part in _statuses(data, end).items():
        decoder = _OF_SAMPLER if part.startswith(_SAMPLER) else _OF_PART.get(part)
        start = data.rfind(b"\n", 0, at) + 1
        # One that is named deeper in a line is none.
        if decoder is not None and find(_EVENT, start) == at:
            found.append(_Span(start, find(b"\n", at), decoder, is_status=True))
    return sorted(found, key=attrgetter("start"))


def _statuses(data: bytes, end: int) -> dict[int, bytes]:
    """Places of status lines with their part: from evenly spread places on one of each part, and each part's newest."""
    found: dict[int, bytes] = {}
    for number in range(SWEEPS_A_CHUNK):
        parts, at = set[bytes](), data.find(_STATUS, number * end // SWEEPS_A_CHUNK, end)
        while at >= 0 and (part := _part(data, at)) not in parts:
            parts.add(part)
            found[at] = part
            at = data.find(_STATUS, at + 1, end)
    parts, at = set(), data.rfind(_STATUS, 0, end)
    while at >= 0 and (part := _part(data, at)) not in parts:
        parts.add(part)
        found[at] = part
        at = data.rfind(_STATUS, 0, at)
    return found


def _part(data: bytes, at: int) -> bytes:
    begin = at + len(_STATUS)
    return data[begin : data.find(b'"', begin)]
