"""The report of a pool: its numbers, its page, and text of a data set that would do harm in it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

from curator.cli import app
from curator.pool import Pool
from curator.report_figures import (
    CAUSES,
    COARSE,
    CUT,
    MAX_DOMAINS,
    OTHERS,
    SIGNAL,
    TOO_EASY,
    TOO_HARD,
    UNSCORED,
    cause_of_groups,
    report_of,
)
from curator.report_page import page, text
from curator.report_pictures import pictures, svg_of
from curator.schema import Outcome, Problem, outcomes_to_batch
from tests.curator.fakes import make_outcome

HOSTILE = "</td><script>alert(1)</script><img src=http://x.example/a onerror=alert(2)> \x1b[2J $\\frac{1}$ \u202e"


def problems(domains: list[str]) -> list[Problem]:
    return [
        Problem(problem_id=f"p{i:04d}", prompt="1?", answer="1", verifier="exact", domain=domain)
        for i, domain in enumerate(domains)
    ]


def make(path: Path, domains: list[str], outcomes: list[Outcome]) -> Pool:
    pool = Pool.create(path, problems(domains))
    if outcomes:
        pool.append_outcomes(outcomes_to_batch(outcomes))
    pool.close()
    return pool


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.mark.parametrize(
    ("passed", "failed", "unscored", "cut", "spread", "cause"),
    [
        (3, 5, 0, 0, 1.0, SIGNAL),
        (8, 0, 0, 0, 0.0, TOO_EASY),
        # Passes whose rewards differ, by a shaping of length for example, are signal.
        (8, 0, 0, 0, 0.2, SIGNAL),
        (0, 8, 0, 3, 0.0, TOO_HARD),
        (0, 8, 0, 4, 0.0, CUT),
        (0, 1, 7, 0, 0.0, UNSCORED),
        (0, 0, 8, 8, 0.0, UNSCORED),
        (3, 5, 0, 0, 0.0, COARSE),
    ],
)
def test_why_a_group_had_no_signal(
    passed: int, failed: int, unscored: int, cut: int, spread: float, cause: str
) -> None:
    values = [np.array([value]) for value in (passed, failed, unscored, cut, spread)]
    assert CAUSES[cause_of_groups(*values)[0]] == cause


def test_the_figures_of_a_domain_are_those_of_its_outcomes(tmp_path: Path) -> None:
    outcomes = [
        make_outcome(0, "p0000", passed=1, failed=3),
        make_outcome(1, "p0000", passed=3, failed=1),
        make_outcome(2, "p0001", passed=4, failed=0),
        make_outcome(3, "p0002", passed=0, failed=4, fate="no_signal"),
        make_outcome(4, "gone", passed=4, failed=0),
    ]
    report = report_of(make(tmp_path / "p", ["a", "a", "b", "b"], outcomes))
    a, b = report.domains
    # p0000 has 4 of 8 and p0001 4 of 4: the bins from 0.5 and of 1; in all 8 of 12.
    assert (a.num_problems, a.num_sampled, a.num_groups, a.num_tokens) == (2, 2, 3, 30)
    assert a.rate == pytest.approx(8 / 12)
    assert a.rate_bins == (0, 0, 0, 0, 0, 1, 0, 0, 0, 1)
    assert dict(zip(CAUSES, a.causes, strict=True))[SIGNAL] == 2
    assert (b.num_sampled, b.rate, b.rate_bins[0]) == (1, 0.0, 1)
    # Sequence is also the step: steps 0 to 3 are four bins. The outcome of a problem that left counts nowhere.
    assert report.step_edges == (0, 1, 2, 3, 4)
    assert a.moved == (0.25, 0.75, 1.0, None)
    assert report.causes() == {SIGNAL: 2, TOO_EASY: 1, TOO_HARD: 1, CUT: 0, UNSCORED: 0, COARSE: 0}
    assert report.fates == {"accepted": 4, "no_signal": 1}


def test_domains_beyond_the_largest_are_one_row(tmp_path: Path) -> None:
    names = [f"d{i:02d}" for i in range(MAX_DOMAINS + 5)]
    report = report_of(make(tmp_path / "p", names + names[:MAX_DOMAINS] + [""], []))
    assert [domain.domain for domain in report.domains] == [*names[:MAX_DOMAINS], OTHERS]
    assert report.domains[-1].num_problems == 6
    assert sum(domain.num_problems for domain in report.domains) == report.num_problems


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs


def test_hostile_text_is_text_and_the_page_asks_for_nothing(tmp_path: Path) -> None:
    pool = make(tmp_path / "p", [HOSTILE, "b"], [make_outcome(i, "p0000", passed=i % 3, failed=2) for i in range(6)])
    quarantine = pa.table({"problem_id": ["p0000"], "prompt": [HOSTILE], "score": [float("nan")]})
    lancedb.connect(str(pool.path)).create_table("quarantine", quarantine)
    scores = tmp_path / "p.scores.parquet"
    pa.parquet.write_table(
        pa.table(
            {
                "problem_id": ["p0000"],
                "passed": [1],
                "attempts": [2],
                "unscored": [0],
                "keep": [False],
                "why": [HOSTILE],
            }
        ),
        scores,
    )
    result = call(pool.path, "--html", tmp_path / "r.html")
    assert result.exit_code == 0, result.stderr
    html = (tmp_path / "r.html").read_text(encoding="utf-8")
    found = _Tags()
    found.feed(html)
    assert not found.tags & {"script", "img", "link", "iframe", "object", "image"}
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    # Of addresses there are only names of formats; what is drawn refers to parts of the page itself.
    references = [value for name, value in found.attributes if name in ("src", "href", "xlink:href")]
    assert all(str(value).startswith("#") for value in references)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "default-src &#x27;none&#x27;" in html
    assert "\x1b" not in result.stdout
    assert "<script>" in result.stdout  # a terminal runs none


def test_every_picture_is_an_element_of_its_own(tmp_path: Path) -> None:
    outcomes = [make_outcome(i, f"p{i % 4:04d}", passed=i % 5, failed=4 - i % 5) for i in range(20)]
    report = report_of(make(tmp_path / "p", ["$x_1", "b\x07", "\u6570\u5b66" * 30, "d"], outcomes))
    drawn = {title: svg_of(figure) for title, _, figure in pictures(report)}
    assert list(drawn) == ["Difficulty by domain", "How it moved", "Why groups had no signal"]
    for svg in drawn.values():
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    again = {title: svg_of(figure) for title, _, figure in pictures(report)}
    assert again == drawn
    assert page(report, [("a", "b", svg) for svg in drawn.values()]).count("<svg") == 3


def test_a_pool_without_outcomes_is_told_from_its_scores_and_its_import(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"id": "p0000", "prompt": "1?", "answer": "1"}\n{"prompt": ""}\n' * 1)
    imported = CliRunner().invoke(
        app,
        [
            "import",
            str(file),
            "--pool",
            str(tmp_path / "p"),
            "--verifier",
            "exact",
            "--yes",
            "--max-refused-share",
            "1",
            "--report",
            str(tmp_path / "import.json"),
        ],
    )
    assert imported.exit_code == 0, imported.stderr
    scores = pa.table(
        {
            "problem_id": ["p0000"],
            "passed": [3],
            "attempts": [5],
            "unscored": [1],
            "keep": [False],
            "why": ["too hard: x"],
        }
    )
    pa.parquet.write_table(scores, tmp_path / "s.parquet")
    options = ("--scores", tmp_path / "s.parquet", "--import-report", tmp_path / "import.json")
    told = json.loads(call(tmp_path / "p", *options, "--json").stdout)
    assert told["rates_from"] == "scores"
    # 3 of the 4 that were scored: the bin from 0.7.
    assert told["domains"][0]["rate_bins"][7] == 1
    assert told["scored"] == {"problems": 1, "kept": 0, "dropped": {"too hard": 1}}
    assert (told["imported"]["rows"], told["imported"]["kept"]) == (2, 1)
    shown = call(tmp_path / "p", *options).stdout
    assert re.search(r"Scored by a model\n.*\n  problems +1\n", shown)
    assert text(report_of(Pool.open(tmp_path / "p"))).startswith(f"{tmp_path / 'p'}\n1 problems, version ")


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--scores", "a.jsonl", "no table of `curator score`"),
        ("--import-report", "a.jsonl", "no report of `curator import --report FILE`"),
        ("--html", "nowhere/r.html", "no such folder"),
    ],
)
def test_what_cannot_be_read_or_written_is_told(tmp_path: Path, option: str, name: str, message: str) -> None:
    make(tmp_path / "p", ["a"], [])
    (tmp_path / "a.jsonl").write_text('{"rows": []}')
    result = call(tmp_path / "p", option, tmp_path / name)
    assert result.exit_code == 2
    assert message in result.stderr
