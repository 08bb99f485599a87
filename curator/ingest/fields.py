"""Which columns hold what: for each field of a problem the columns looked for, in order, and how the value is read.

The first column that is there and not null decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from curator.errors import RowRefused
from curator.ingest import columns as read
from curator.schema import verifier_items, verifier_text

Reader = Callable[[Any], Any]
Table = Mapping[str, Mapping[str, Reader]]


def name_of(value: Any) -> str | None:
    """Text or a whole number as a name, also alone in a list; None for all else, and the next column is looked at."""
    if isinstance(value, list):
        return name_of(value[0]) if len(value) == 1 else None
    if isinstance(value, str):
        return value.strip() or None
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def first_name(value: Any) -> str | None:
    """As `name_of`, of a list the first: the broadest of several domains."""
    return name_of(value[0]) if isinstance(value, list) and value else name_of(value)


def read_verifier(value: Any) -> str | None:
    """As `name_of`; a list of several verifiers, or its JSON, as the text that a problem holds. Raises RowRefused."""
    if isinstance(value, list):
        value = json.dumps(value, default=str)
    if not isinstance(value, str):
        return name_of(value)
    try:
        items = verifier_items(value)
    except ValueError as error:
        raise RowRefused(f"verifier: {error}") from None
    return name_of(value) if items is None else verifier_text(items)


COLUMNS: Table = {
    "prompt": {
        "prompt": read.read_prompt,
        "messages": read.read_conversation,
        "source_prompt": read.read_conversation,
        "conversations": read.read_turns,
        "responses_create_params.input": read.read_prompt,
        "problem": read.read_prompt,
        "question": read.read_prompt,
        "instruction": read.read_prompt,
    },
    "answer": {
        "reward_model.ground_truth": read.read_ground_truth,
        "ground_truth": read.read_ground_truth,
        "answer": read.read_answer,
        "final_answer": read.read_gold,
        "expected_answer": read.read_gold,
        "verification_info": read.read_check,
        "tests": read.read_check,
        "input_output": read.read_check,
        "conversations": read.read_turns_gold,
        "solution": read.read_solution,
        "gold_standard_solution": read.read_solution,
        "info": read.read_check,
    },
    "verifier": {
        "verifier": read_verifier,
        **dict.fromkeys(("dataset", "data_source", "task_type", "ability", "agent_ref", "agent_ref.name"), name_of),
    },
    "problem_id": dict.fromkeys(("id", "problem_id", "uuid", "task_id"), name_of),
    "domain": dict.fromkeys(
        ("domain", "ability", "topic", "info.domain", "problem_type", "task_type", "data_source"), first_name
    ),
    "source": dict.fromkeys(("source", "data_source", "problem_source", "original_dataset"), name_of),
}
"""Field of a problem -> columns in order -> reader. A dot looks inside an object."""

MAPPED_READERS: Mapping[str, Reader] = {
    "prompt": read.read_prompt,
    "answer": read.read_answer,
    "verifier": read_verifier,
    "domain": first_name,
}
"""Readers of columns that a mapping names; `name_of` for the other fields."""

FROM_CONTENT = "(content)"
"""The mapping of `problem_id` that makes ids of prompt and gold, whatever columns there are."""

CONTINUED_BY = {"instruction": "input"}
"""Columns of prompts that go on in another one."""


def with_mapping(mapping: Mapping[str, str]) -> Table:
    """`COLUMNS`, where a mapped field has its one column. Raises ValueError for an unknown field."""
    for name in mapping:
        if name not in COLUMNS:
            raise ValueError(f"mapping of '{name}': no field of a problem; known: {', '.join(COLUMNS)}")
    return {
        name: {mapping[name]: MAPPED_READERS.get(name, name_of)} if name in mapping else known
        for name, known in COLUMNS.items()
    }
