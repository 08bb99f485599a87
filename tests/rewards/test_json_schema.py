"""Tests of the verifier `json_schema`."""

import json
from typing import Any

import pytest

from stream_grpo.rewards.json_schema import json_schema
from stream_grpo.types import Decision
from tests.rewards.problem import FakeProblem

pytest.importorskip("jsonschema")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GOOD = '{"name": "Ada", "age": 36}'


def decide(response: str, schema: Any = SCHEMA) -> Decision:
    return json_schema(response, FakeProblem(answer="", verifier="json_schema", extra={"schema": schema})).decision


@pytest.mark.parametrize(
    "response",
    [
        GOOD,
        f"Here it is:\n```json\n{GOOD}\n```\nDone.",
        f"```\n[1]\n```\nNo:\n```json\n{GOOD}\n```",  # the last block counts
        f"<answer>{GOOD}</answer>",
        f"<answer>\n```json\n{GOOD}\n```\n</answer>",
        f"<think>[1]</think>{GOOD}",
    ],
)
def test_the_json_of_a_response_is_found(response: str) -> None:
    assert decide(response) is Decision.PASS


@pytest.mark.parametrize(
    "response",
    [
        '{"name": "Ada"}',
        '{"name": "Ada", "age": -1}',
        '{"name": "Ada", "age": NaN}',
        '{"name": "Ada", "age"',
        "Ada",
        "",
    ],
)
def test_what_is_not_json_or_not_valid_fails(response: str) -> None:
    assert decide(response) is Decision.FAIL


def test_the_schema_may_be_json_text_or_the_answer() -> None:
    assert decide(GOOD, json.dumps(SCHEMA)) is Decision.PASS
    assert json_schema(GOOD, FakeProblem(answer=json.dumps(SCHEMA))).decision is Decision.PASS


def test_deep_nesting_is_the_response_s_fault() -> None:
    recursive = {"type": "array", "items": {"$ref": "#"}}
    assert decide("[" * 100_000, recursive) is Decision.FAIL


@pytest.mark.parametrize(
    ("schema", "message"), [("{", "not JSON"), ("[1]", "an object is needed"), ({"type": "tree"}, "invalid schema")]
)
def test_a_row_without_a_sound_schema_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decide(GOOD, schema)


def test_references_to_other_documents_are_not_fetched() -> None:
    with pytest.raises(Exception, match=r"example\.invalid"):
        decide(GOOD, {"$ref": "https://example.invalid/schema.json"})


def test_the_evidence_names_the_place() -> None:
    result = json_schema('{"name": "Ada", "age": "x"}', FakeProblem(answer="", extra={"schema": SCHEMA}))
    assert result.evidence == """at $.age: "'x' is not of type 'integer'\""""
