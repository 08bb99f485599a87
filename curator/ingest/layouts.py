"""The layouts of public pools, recognised by their columns, and the rows that their authors mark as not to be used.

What is read from which column is the same for all layouts (`fields.COLUMNS`); a layout is a name for the report, so
that whoever imports sees whether the file was taken for what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Layout(NamedTuple):
    """A name, and the columns that all rows of the layout have; `a.b` is the key b of the object a."""

    name: str
    columns: tuple[str, ...]


POOL_FIELDS = ("problem_id", "prompt", "answer", "verifier", "domain", "source", "extra")
EXPORT = Layout("export of a pool", POOL_FIELDS)

LAYOUTS = (
    EXPORT,
    Layout("Skywork-OR1", ("prompt", "reward_model.ground_truth", "extra_info.model_difficulty")),
    Layout("Dolci", ("prompt", "ground_truth", "dataset", "source_prompt")),
    Layout("verl", ("prompt", "reward_model.ground_truth", "data_source")),
    Layout("OpenR1-Math", ("problem", "answer", "messages", "generations")),
    Layout("NuminaMath-1.5", ("problem", "answer", "problem_type", "question_type", "problem_is_valid")),
    Layout("OpenMathReasoning", ("problem", "expected_answer", "problem_type", "problem_source")),
    Layout("Big-Math", ("problem", "answer", "domain", "llama8b_solve_rate")),
    Layout("DeepMath", ("question", "final_answer", "topic", "difficulty")),
    Layout("SYNTHETIC or INTELLECT-2", ("prompt", "verification_info", "problem_id")),
    Layout("INTELLECT-3", ("question", "info")),
    Layout("NeMo Gym", ("responses_create_params.input",)),
    Layout("RLVR", ("messages", "ground_truth", "dataset")),
    Layout("question and gold as two turns", ("conversations.1.ground_truth",)),
    Layout("turns with from and value", ("conversations",)),
    Layout("code with tests", ("problem", "tests")),
    Layout("code with tests", ("question", "input_output")),
    Layout("problem, answer, difficulty", ("problem", "answer", "difficulty")),
    Layout("problem, answer", ("problem", "answer")),
    Layout("question, answer", ("question", "answer")),
    Layout("prompt and columns for the reward function", ("prompt",)),
    Layout("instruction", ("instruction",)),
)
UNKNOWN = Layout("unknown", ())

MISSING = object()


def recognise(row: Mapping[str, Any]) -> Layout:
    """The first layout all of whose columns the row has; `UNKNOWN` where there is none."""
    for layout in LAYOUTS:
        if all(lookup(row, column) is not MISSING for column in layout.columns):
            return layout
    return UNKNOWN


def lookup(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or MISSING. A name with a dot that is no column is a path into objects and lists."""
    if column in row:
        return row[column]
    name, dot, inner = column.partition(".")
    value: Any = row.get(name) if dot else None
    if isinstance(value, list):
        value = dict(zip(map(str, range(len(value))), value, strict=True)) if inner else None
    return lookup(value, inner) if isinstance(value, Mapping) else MISSING


_NO_GOLDS = frozenset({"proof", "notfound"})
"""What the answer of a NuminaMath row is where the solution has none."""


def marked_unusable(row: Mapping[str, Any]) -> str | None:
    """Why the data set's own marks say that a row has no gold to compare with; None where they do not."""
    if "problem_is_valid" not in row:
        return None
    if row["problem_is_valid"] not in ("Yes", None, True):
        return "the column 'problem_is_valid' is not Yes"
    answer = row.get("answer")
    if isinstance(answer, str) and answer.strip().lower() in _NO_GOLDS:
        return f"the answer is '{answer.strip().lower()}', which is no gold"
    return None
