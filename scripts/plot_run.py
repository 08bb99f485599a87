"""Draws a finished run: held-out pass@1 before and after, reward, policy age, and where every token went."""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

BEFORE, AFTER, ACCENT = "#b8c4d6", "#2a5d9f", "#c8553d"
FATES = {"trained": AFTER, "no_signal": "#d9c27a", "stale": ACCENT, "invalid": "#8d6a9f", "buffered": BEFORE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("out", type=Path, help="picture to write")
    arguments = parser.parse_args()
    summary = json.loads((arguments.run / "summary.json").read_text())
    lines = [json.loads(line) for line in (arguments.run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), constrained_layout=True)
    draw_heldout(axes[0, 0], summary)
    draw_reward(axes[0, 1], steps)
    draw_age(axes[1, 0], steps)
    draw_tokens(axes[1, 1], steps)
    figure.savefig(arguments.out, dpi=130)


def draw_heldout(axis: Axes, summary: dict[str, Any]) -> None:
    domains = [name for name in summary["heldout_before"] if name not in ("all", "headline")]
    for offset, color, label in ((-0.2, BEFORE, "before"), (0.2, AFTER, "after")):
        scores = [summary[f"heldout_{label}"][domain] for domain in domains]
        rates = [score["pass_at_1"] for score in scores]
        errors = [[s["pass_at_1"] - s["low"] for s in scores], [s["high"] - s["pass_at_1"] for s in scores]]
        places = [index + offset for index in range(len(domains))]
        axis.bar(places, rates, 0.38, color=color, label=label, yerr=errors, ecolor="#444", capsize=2)
    axis.set_xticks(range(len(domains)), domains)
    axis.set_ylim(0, 1)
    axis.legend(frameon=True, framealpha=0.9, edgecolor="none", ncols=2, loc="lower left")
    rise = summary["heldout_rise"]
    axis.set_title(f"held-out pass@1: rise {rise['mean']:+.3f} [{rise['low']:+.3f}, {rise['high']:+.3f}]", loc="left")


def draw_reward(axis: Axes, steps: list[dict[str, Any]]) -> None:
    axis.plot([s["step"] for s in steps], [s["reward_mean"] for s in steps], color=AFTER)
    axis.set_title("mean reward of the trained groups", loc="left")
    axis.set_xlabel("learner step")
    axis.set_ylim(0, 1)


def draw_age(axis: Axes, steps: list[dict[str, Any]]) -> None:
    places = [s["step"] for s in steps]
    axis.fill_between(places, [s["age_max"] for s in steps], step="mid", color=BEFORE, label="oldest token")
    axis.plot(places, [s["age_mean"] for s in steps], color=AFTER, label="mean of groups")
    axis.set_title("policy age at lease, in learner steps", loc="left")
    axis.set_xlabel("learner step")
    axis.set_ylim(0)
    axis.legend(frameon=True, framealpha=0.9, edgecolor="none", ncols=2, loc="lower right")


def draw_tokens(axis: Axes, steps: list[dict[str, Any]]) -> None:
    places = [s["step"] for s in steps]
    shown = [fate for fate in FATES if any(s["tokens"][fate] for s in steps)]
    values = [[s["tokens"][fate] / 1000 for s in steps] for fate in shown]
    axis.stackplot(places, values, colors=[FATES[fate] for fate in shown], labels=[f.replace("_", " ") for f in shown])
    axis.set_title("sampled tokens by fate, thousands", loc="left")
    axis.set_xlabel("learner step")
    axis.legend(frameon=False, loc="upper left")


if __name__ == "__main__":
    main()
