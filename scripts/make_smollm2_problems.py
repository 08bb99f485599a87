"""Makes graded problems of reasoning-gym for a small pretrained model: pool.jsonl and heldout.jsonl.

A grade is a family with its settings, and the domain of its problems. Each question (normalised as curator compares it)
is in one of the two files, once. The same seeds give the same bytes.

A prompt is a chat: some questions of the grade answered with the number alone, then the problem's own. A model of this
size talks about the problem otherwise, every rollout fails, and no group has signal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from curator.dedup import digest, normalised
from curator.errors import PoolError, RowRefused
from curator.ingest.formats import Row
from curator.ingest.reasoning_gym import reasoning_gym_source
from stream_grpo.files import replace_with

SYSTEM = "Answer with the number alone."
NUM_SHOTS = 3
"""Answered questions of each prompt, the same in all prompts of a grade, and in neither file themselves."""
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
    # Sums and differences of one digit are 200, products 100: all that is left beside those shown and held out.
    "sum-1": Grade(family="chain_sum", settings=_terms(2, 1), num_pool=157, num_heldout=40),
    "sum-2": Grade(family="chain_sum", settings=_terms(2, 2), num_pool=400, num_heldout=40),
    "sum-3": Grade(family="chain_sum", settings=_terms(2, 3), num_pool=400, num_heldout=40),
    "sum-1x3": Grade(family="chain_sum", settings=_terms(3, 1), num_pool=400, num_heldout=40),
    "sum-2x3": Grade(family="chain_sum", settings=_terms(3, 2), num_pool=400, num_heldout=40),
    "product-1": Grade(family="products", settings=_terms(2, 1), num_pool=77, num_heldout=20),
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
        num_wanted = NUM_SHOTS + grade.num_heldout + grade.num_pool
        rows = list(islice(fresh(domain, grade, MAX_DRAWS * num_wanted, seen), num_wanted))
        if len(rows) < num_wanted:
            raise PoolError(
                f"{domain}: {len(rows)} different problems in {MAX_DRAWS * num_wanted} draws, not {num_wanted}"
            )
        shots, asked = rows[:NUM_SHOTS], rows[NUM_SHOTS:]
        chats = [{**row, "prompt": chat(shots, row["prompt"])} for row in asked]
        heldout += chats[: grade.num_heldout]
        pool += chats[grade.num_heldout :]
    return pool, heldout


def chat(shots: Sequence[Row], question: str) -> list[dict[str, str]]:
    """The messages of a prompt: the shots with their answers, then the question."""
    messages = [{"role": "system", "content": SYSTEM}]
    for shot in shots:
        messages.append({"role": "user", "content": shot["prompt"]})
        messages.append({"role": "assistant", "content": shot["answer"]})
    return [*messages, {"role": "user", "content": question}]


def fresh(domain: str, grade: Grade, num_draws: int, seen: set[bytes]) -> Iterator[Row]:
    """Problems of a grade whose question is not in `seen`, which they are added to."""
    for _, row in reasoning_gym_source(grade.family, seed=0, size=num_draws, config=grade.settings).rows:
        if isinstance(row, RowRefused):
            continue
        question = digest(normalised(row["prompt"]))
        if question not in seen:
            seen.add(question)
            yield {**row, "domain": domain}


if __name__ == "__main__":
    main()
