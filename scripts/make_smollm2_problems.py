"""Makes graded problems of reasoning-gym for a small pretrained model: pool.jsonl and heldout.jsonl.

A grade is a family with its settings, and the domain of its problems. Each content (the prompt, normalised as curator
compares it) is in one of the two files, once. The same seeds give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from curator.dedup import digest, normalised
from curator.errors import PoolError, RowRefused
from curator.ingest.formats import Row
from curator.ingest.reasoning_gym import reasoning_gym_source
from stream_grpo.files import replace_with

MAX_DRAWS = 50
"""Draws per problem that is wanted; a grade with fewer contents than that finds ends with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """Problems of one difficulty."""

    family: str
    settings: Mapping[str, object]
    num_pool: int
    num_heldout: int


def _terms(num_terms: int, num_digits: int) -> dict[str, object]:
    return {"min_terms": num_terms, "max_terms": num_terms, "min_digits": num_digits, "max_digits": num_digits}


EQUATION = {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9}
GRADES: Mapping[str, Grade] = {
    # Sums and differences of one digit are 200, products 100: what is not held out is the pool.
    "sum-1": Grade(family="chain_sum", settings=_terms(2, 1), num_pool=160, num_heldout=40),
    "sum-2": Grade(family="chain_sum", settings=_terms(2, 2), num_pool=400, num_heldout=40),
    "sum-3": Grade(family="chain_sum", settings=_terms(2, 3), num_pool=400, num_heldout=40),
    "sum-1x3": Grade(family="chain_sum", settings=_terms(3, 1), num_pool=400, num_heldout=40),
    "sum-2x3": Grade(family="chain_sum", settings=_terms(3, 2), num_pool=400, num_heldout=40),
    "product-1": Grade(family="products", settings=_terms(2, 1), num_pool=80, num_heldout=20),
    "product-2": Grade(family="products", settings=_terms(2, 2), num_pool=400, num_heldout=20),
    "gcd-20": Grade(family="gcd", settings={"max_value": 20}, num_pool=300, num_heldout=40),
    "equation": Grade(
        family="simple_equations",
        settings={**EQUATION, "operators": ["+", "-"], "operators_weights": [0.5, 0.5]},
        num_pool=400,
        num_heldout=40,
    ),
}
"""By domain. `sum-2x3` is a sum or difference of three numbers of two digits."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the two files go")
    folder = parser.parse_args().folder
    try:
        pool, heldout = split(GRADES)
    except PoolError as error:
        sys.exit(f"scripts/make_smollm2_problems: {error}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in {"pool.jsonl": pool, "heldout.jsonl": heldout}.items():
        replace_with(folder / name, "".join(json.dumps(row) + "\n" for row in rows).encode())
    print(f"{folder}: {len(pool)} problems in pool.jsonl, {len(heldout)} in heldout.jsonl, {len(GRADES)} grades")


def split(grades: Mapping[str, Grade]) -> tuple[list[Row], list[Row]]:
    """The pool and the held-out problems. Raises PoolError for a grade that has fewer than are wanted."""
    pool: list[Row] = []
    heldout: list[Row] = []
    seen: set[bytes] = set()
    for domain, grade in grades.items():
        num_wanted = grade.num_pool + grade.num_heldout
        rows = list(islice(fresh(domain, grade, MAX_DRAWS * num_wanted, seen), num_wanted))
        if len(rows) < num_wanted:
            raise PoolError(
                f"{domain}: {len(rows)} different problems in {MAX_DRAWS * num_wanted} draws, not {num_wanted}"
            )
        heldout += rows[: grade.num_heldout]
        pool += rows[grade.num_heldout :]
    return pool, heldout


def fresh(domain: str, grade: Grade, num_draws: int, seen: set[bytes]) -> Iterator[Row]:
    """Problems of a grade whose content is not in `seen`, which they are added to."""
    for _, row in reasoning_gym_source(grade.family, seed=0, size=num_draws, config=grade.settings).rows:
        if isinstance(row, RowRefused):
            continue
        content = digest(normalised(row["prompt"]))
        if content not in seen:
            seen.add(content)
            yield {**row, "domain": domain}


if __name__ == "__main__":
    main()
