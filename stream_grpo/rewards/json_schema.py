"""JSON in the response against a JSON schema."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from stream_grpo.rewards.result import Verdicts, VerifiableProblem, shown
from stream_grpo.types import RewardResult

NAME, VERSION = "json_schema", "1"
_VERDICTS = Verdicts(NAME, VERSION)
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL | re.IGNORECASE)
_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def json_schema(response_text: str, problem: VerifiableProblem, is_cut: bool = False) -> RewardResult:
    """Pass if the JSON of the response is valid under the problem's schema.

    The JSON is the last <answer>, within it or the response the last ``` block, else the whole text. The schema is
    `extra["schema"]` (a mapping or JSON text), or else the problem's answer. References to other documents are never
    fetched. NaN and Infinity are not JSON.

    Raises ValueError for a schema that is none, and ImportError where the package jsonschema is missing.
    """
    validator = _validator(_schema_text(problem), problem.problem_id)
    text = json_text(response_text)
    try:
        instance = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return _VERDICTS.failed(f"not JSON ({error}): {shown(text)}")
    try:
        fault = _first_error(validator, instance)
    except RecursionError:
        return _VERDICTS.failed(f"nested too deeply: {shown(text)}")
    if fault is not None:
        return _VERDICTS.failed(f"at {fault.json_path}: {shown(fault.message)}")
    return _VERDICTS.passed(f"valid: {shown(text)}")


def json_text(response_text: str) -> str:
    """The part of a response that should be JSON."""
    text = response_text.rpartition("</think>")[2]
    for pattern in (_TAGS, _FENCE):
        found = pattern.findall(text)
        text = found[-1] if found else text
    return text.strip()


def _schema_text(problem: VerifiableProblem) -> str:
    schema = problem.extra.get("schema") or problem.answer
    return schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)


@lru_cache(maxsize=256)
def _validator(schema_text: str, problem_id: str) -> Any:
    try:
        import jsonschema
        import referencing
    except ImportError as error:
        raise ImportError("the verifier json_schema needs the package jsonschema: pip install jsonschema") from error
    try:
        schema = json.loads(schema_text)
    except ValueError as error:
        raise ValueError(f"problem {problem_id} has a schema that is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise ValueError(f"problem {problem_id} has schema {shown(schema_text)}: an object is needed")
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"problem {problem_id} has an invalid schema: {error.message[:200]}") from error
    return validator(schema, registry=referencing.Registry())


def _first_error(validator: Any, instance: Any) -> Any:
    from jsonschema.exceptions import best_match

    return best_match(validator.iter_errors(instance))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
