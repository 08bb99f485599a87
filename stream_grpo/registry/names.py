"""The whole registry, and how the fields of a line are found in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from stream_grpo.registry.figure import FREE, Figure, figures
from stream_grpo.registry.status import STATUS
from stream_grpo.registry.step import STEP

LINE = figures(
    "every",
    """
    time_s | s | unix time
    source | | process that wrote the line
    event | | step, status, evaluation, control, alarm, warning
    part | | of a status: whose it is
    """,
)

EVALUATION = figures(
    "evaluation",
    """
    version | | weights that were evaluated: branch, step
    branch | | of these weights
    step | steps | of these weights
    heldout/*/pass_at_1 | share | of a domain; `all` problems; `headline`: those of `evaluation.domains`
    heldout/*/low | share | lower end of its 95% interval, a bootstrap over problems
    heldout/*/high | share | upper end
    heldout/*/num_problems | problems | with a scored sample
    problems/* | | of a problem: passed and scored samples
    num_tokens | tokens | sampled for it
    seconds | s | from its first request to its last token
    pinned_s | s | for which newer weights waited for it
    """,
)

CONTROL = figures(
    "control",
    """
    step | steps | learner step after which the closed loop changed something
    branch | | of the run
    setting | | what it changed
    before | | its value until then
    after | | its value from then on
    reason | | why
    """,
)

ALARM = figures(
    "alarm",
    """
    name | | which alarm; see docs/alarms.md
    sentence | | what is seen, with its figures
    cause | | what is likely behind it, and what to look at
    step | steps | newest learner step then
    """,
)

WARNING = figures(
    "warning",
    """
    message | | what a process has to say
    """,
)

REGISTRY = (*LINE, *STEP, *STATUS, *EVALUATION, *CONTROL, *ALARM, *WARNING)

TITLES: Mapping[str, str] = {
    "every": "Every line",
    "step": "`step`: a learner step, written by the learner",
    "sampler": "`status` of a sampler",
    "buffer": "`status` of the buffer",
    "curator": "`status` of the curator",
    "learner": "`status` of the learner",
    "weights": "`status` of the process that gives out weights, with `cluster.node_root`",
    "evaluation": "`evaluation`: held-out problems during training, written by a sampler",
    "control": "`control`: what the closed loop changed, written by the learner",
    "alarm": "`alarm`: written by the launcher",
    "warning": "`warning`: written by any process",
}


class Found(NamedTuple):
    """A field of a line, and what the registry has on it."""

    path: tuple[str, ...]
    value: Any
    figure: Figure | None
    """None: the registry lacks it."""


def kind_of(line: Mapping[str, Any]) -> str:
    """Which table of the registry a line belongs to."""
    if line["event"] != "status":
        return str(line["event"])
    part = str(line["part"])
    return "sampler" if part.startswith("sampler") else part


def fields_of(line: Mapping[str, Any]) -> Iterator[Found]:
    """Every field of a line that is no mapping with fields of its own."""
    kind = kind_of(line)
    for path, value in _leaves(line, ()):
        yield Found(path, value, find(kind, path))


def _leaves(values: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def unknown(line: Mapping[str, Any]) -> list[str]:
    """Fields of a line that the registry lacks."""
    return ["/".join(found.path) for found in fields_of(line) if found.figure is None]


@lru_cache(maxsize=1 << 14)
def find(kind: str, path: tuple[str, ...]) -> Figure | None:
    """The figure at a path: an exact name before one with a free word."""
    of_kind = [figure for figure in REGISTRY if figure.line in (kind, "every") and len(figure.words) == len(path)]
    fitting = [figure for figure in of_kind if all(map(_fits, figure.words, path))]
    return min(fitting, key=lambda figure: figure.name.count(FREE), default=None)


def _fits(word: str, key: str) -> bool:
    start, free, _ = word.partition(FREE)
    return key.startswith(start) if free else key == word


def as_markdown() -> str:
    """The registry as the tables of docs/metrics.md."""
    parts: list[str] = []
    for line, title in TITLES.items():
        rows = [f"| `{f.name}` | {f.unit} | {f.meaning} |" for f in REGISTRY if f.line == line]
        parts.append("\n".join([f"### {title}", "", "| name | unit | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)
