"""What docs/benchmarks.md says of the training of a pretrained model. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.page import Goal, goals, table
from benchmarks.watch import memory_table

from smollm2.cells import OURS, SAID, TRL, Score, both_reach, reaches, step_of

STEP_VS_TRL = 3.0
Lines = Mapping[str, Mapping[str, Any]]
"""Lines of results by name."""


def section(lines: Lines, *, config: str) -> tuple[str, float | None]:
    """The section, and seconds of a step of TRL over this trainer's, of as many rollouts."""
    there = [name for name in (OURS, TRL) if name in lines]
    curves = {name: [Score(*point) for point in lines[name]["curve"]] for name in there}
    ratio = step_ratio(lines)
    parts = []
    if there:
        first = lines[there[0]]
        minutes = " and ".join(f"{lines[name]['minutes']:g}" for name in there)
        parts += [
            f"`{config}`, {minutes} minutes of training, one seed. Held-out pass@1 over {first['num_scored']} "
            f"problems, {first['num_samples']} samples each, scored off the clock; 95 % intervals are over problems.",
            table(
                ("", "before", "after", "rise", "95 %", "steps", "seconds a step", "tokens/s", "learning rate"),
                [_row(name, lines[name], curves[name]) for name in there],
            ),
            goals([Goal("step_vs_trl", ratio, STEP_VS_TRL)]),
            _times(curves),
            "![Held-out pass@1 by minutes of training, with 95 % intervals](images/smollm2.png)",
        ]
        parts += [_curve(name, curves[name]) for name in there]
    parts += _trials(lines)
    for name in there:
        parts += [f"Answers before and after, {SAID[name]}, one sample each:", _answers(lines[name]["answers"])]
    for name in there:
        parts += [f"Memory, {SAID[name]}:", memory_table(lines[name]["memory"])]
    return "\n\n".join(part for part in parts if part), ratio


def step_ratio(lines: Lines) -> float | None:
    """How many times as long a step of TRL takes; None until both are there."""
    if OURS not in lines or TRL not in lines:
        return None
    groups = lines[OURS]["settings"]["groups_per_step"]
    ours, trl = (step_of(lines[n]["loop"], lines[n]["settings"]["groups_per_step"], groups) for n in (OURS, TRL))
    return trl / ours


def side_by_side(
    before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]], num: int
) -> list[dict[str, str]]:
    """The first answers of every domain in turn, from both."""
    said = {answer["id"]: answer["said"] for answer in after}
    by_domain: dict[str, list[dict[str, str]]] = {}
    for answer in before:
        by_domain.setdefault(answer["domain"], []).append(
            {**{name: answer[name] for name in ("domain", "asked", "gold")}, "before": answer["said"],
             "after": said[answer["id"]]}
        )  # fmt: skip
    depth = max(map(len, by_domain.values()), default=0)
    turns = [found[place] for place in range(depth) for _, found in sorted(by_domain.items()) if place < len(found)]
    return turns[:num]


def _row(name: str, line: Mapping[str, Any], curve: Sequence[Score]) -> tuple[str, ...]:
    loop, settings = line["loop"], line["settings"]
    mean, low, high = line["rise"]
    return (
        SAID[name],
        f"{curve[0].pass_at_1:.3f}",
        f"{curve[-1].pass_at_1:.3f}",
        f"{mean:+.3f}",
        f"{low:+.3f} to {high:+.3f}",
        str(loop["steps"]),
        f"{loop['wall_s'] / loop['steps']:.1f}",
        f"{loop['tokens'] / loop['wall_s']:,.0f}",
        f"{settings['learning_rate']:g}",
    )


def _times(curves: Mapping[str, Sequence[Score]]) -> str:
    level = both_reach(curves)
    if level is None:
        best = {name: max(point.pass_at_1 for point in curve) for name, curve in curves.items()}
        told = ", ".join(f"{SAID[name]} {value:.3f}" for name, value in best.items())
        return f"No score above the start is reached by both; the best scores are: {told}."
    times = {name: reaches(curves[name], level) for name in (OURS, TRL)}
    told = ", ".join(f"{SAID[name]} after {(value or 0.0) / 60:.0f} min" for name, value in times.items())
    return f"The highest score that both reach is {level:.3f}: {told}."


def _curve(name: str, curve: Sequence[Score]) -> str:
    rows = [
        (
            f"{point.seconds / 60:.0f}",
            str(point.step),
            f"{point.tokens / 1000:,.0f}",
            f"{point.pass_at_1:.3f}",
            f"{point.low:.3f} to {point.high:.3f}",
        )
        for point in curve
    ]
    heads = (f"minutes, {SAID[name]}", "step", "generated tokens, thousands", "held-out pass@1", "95 %")
    return table(heads, rows)


def _trials(lines: Lines) -> list[str]:
    rows = [
        (
            SAID[line["trainer"]],
            f"{line['settings']['learning_rate']:g}",
            str(line["settings"]["groups_per_step"]),
            str(line["loop"]["steps"]),
            f"{line['curve'][0][3]:.3f} to {line['curve'][-1][3]:.3f}",
        )
        for name, line in sorted(lines.items())
        if "-trial-" in name
    ]
    if not rows:
        return []
    minutes = next(line["minutes"] for name, line in lines.items() if "-trial-" in name)
    heads = ("", "learning rate", "groups a step", "steps", "held-out pass@1")
    return [f"Trials of {minutes:g} minutes, by which learning rate and batch are chosen:", table(heads, rows)]


def _answers(found: Sequence[Mapping[str, str]]) -> str:
    rows = [(a["domain"], *(_plain(a[name]) for name in ("asked", "gold", "before", "after"))) for a in found]
    return table(("grade", "question", "right", "before", "after"), rows)


def _plain(text: str) -> str:
    """As the cell of a table: one line, at most 60 characters, none that Markdown or HTML reads."""
    line = " ".join(text.split())
    line = line if len(line) <= 60 else f"{line[:57]}..."
    for found, put in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("`", "'"), ("*", "\\*")):
        line = line.replace(found, put)
    return line or "(nothing)"
