"""The configuration as a file: TOML in, `--set a.b=c` on top, one clear error for what is wrong, TOML out."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from stream_grpo.config import Config
from stream_grpo.config_http import JUDGES
from stream_grpo.errors import ConfigError

NEAR = 0.7
"""Similarity of two names above which one is taken for a misspelling of the other."""
EXPECTED = {
    "tuple_type": "expected a list, in square brackets",
    "model_type": "expected a section with settings of its own, not a value",
}
"""Types of pydantic's errors whose own words speak of Python."""


def load(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML file, apply `a.b=c` overrides, validate.

    Raises ConfigError with the file, the key, the value, the reason and what would be right.
    """
    return parse(with_overrides(_read(path), overrides), source=str(path))


def load_run(run_dir: Path, overrides: Iterable[str] = ()) -> Config:
    """The configuration that a run folder was begun with, for the folder as it is called now, with overrides."""
    path = run_dir / "config.toml"
    if not path.exists():
        raise ConfigError(f"{run_dir}: no run there (no config.toml)")
    tree = with_overrides(_read(path), overrides)
    run = tree.setdefault("run", {})
    if isinstance(run, dict):  # anything else is refused below
        run.update(name=run_dir.name, root=str(run_dir.parent))
    try:
        return parse(tree, source=str(path))
    except ConfigError as error:
        if overrides:
            raise
        raise ConfigError(f"{error}\nanother version of stream-grpo wrote this; begin a new run") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def with_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Apply `a.b=c` to a tree of plain values. Values are TOML; what is no TOML is text. Raises ConfigError."""
    for override in overrides:
        _apply(tree, override)
    return tree


def parse(tree: Mapping[str, Any], source: str) -> Config:
    """Validate a tree of plain values; `source` is named in errors. Raises ConfigError."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_explain(e)}" for e in error.errors())) from None


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override}: expected key=value, for example --set run.seed=1")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {override}: {parent} is a value, not a section")
    tree[leaf] = value


def _explain(error: Mapping[str, Any]) -> str:
    location = [str(part) for part in error["loc"]]
    key = ".".join(_keys(location))
    if error["type"] == "extra_forbidden":
        return f"unknown key {key}: {_hint(location, is_section=isinstance(error['input'], Mapping))}"
    if error["type"] == "missing":
        return f"{key}: required and not given"
    message = EXPECTED.get(error["type"], error["msg"].removeprefix("Value error, "))
    if key and isinstance(error["input"], Mapping):
        return f"{key}: {message}"
    return f"{key} = {error['input']!r}: {message}" if key else message


def _keys(location: list[str]) -> list[str]:
    """The keys of the file: the kind of a judge is pydantic's way to it, and none."""
    return [*location[:3], *location[4:]] if location[:2] == ["rewards", "http"] else location


def _hint(location: list[str], *, is_section: bool) -> str:
    """The key that was meant: one beside it with a name that is near, else a setting so called in any section."""
    *section, name = location
    beside = _names(section)
    if (section or is_section) and (near := difflib.get_close_matches(name, beside, n=1, cutoff=NEAR)):
        return f"did you mean {'.'.join([*_keys(section), near[0]])}?"
    elsewhere = {setting: part for part in reversed(_names([])) for setting in _names([part])}
    if near := difflib.get_close_matches(name, elsewhere, n=1, cutoff=1.0 if is_section else NEAR):
        return f"did you mean {elsewhere[near[0]]}.{near[0]}?"
    return f"known: {', '.join(sorted(beside))}"


def _names(section: list[str]) -> list[str]:
    """The settings of a section; none of what is no section."""
    if section[:2] == ["rewards", "http"] and len(section) > 3:  # rewards.http.NAME.kind
        return next(list(judge.model_fields) for judge in JUDGES if _kind(judge) == section[3])
    kind: Any = Config
    for name in section:
        kind = _inner(kind, name)
    return list(getattr(kind, "model_fields", ()))


def _kind(judge: Any) -> str:
    return str(get_args(judge.model_fields["kind"].annotation)[0])


def _inner(kind: Any, name: str) -> Any:
    """What stands under `name`: a field of a section, or an item of sections by names of the user's or by number."""
    if name.isdecimal() and hasattr(kind, "model_fields"):
        return kind
    found = kind.model_fields[name].annotation if hasattr(kind, "model_fields") else get_args(kind)[-1]
    choices = [choice for choice in get_args(found) if hasattr(choice, "model_fields")]
    return choices[0] if choices and get_origin(found) is not dict else found


def missing_files(config: Config) -> list[str]:
    """The problem files that a new run needs and does not find."""
    missing: list[str] = []
    named = [("pool.files", config.pool.files), ("evaluation.files", config.evaluation.files)]
    named += [(f"evaluation.guards, {guard.name}", guard.files) for guard in config.evaluation.guards]
    for name, files in named:
        missing += [f"{name}: {file}: no such file" for file in files if not file.exists()]
    return missing


def differences(config: Config, other: Config) -> list[str]:
    """The settings in which a configuration differs from another, as `section.name = new (was old)`."""
    new, old = config.model_dump(mode="json"), other.model_dump(mode="json")
    return [
        f"{section}.{name} = {value!r} (was {old[section][name]!r})"
        for section, values in new.items()
        for name, value in values.items()
        if value != old[section][name]
    ]


def to_toml(config: Config) -> str:
    """The resolved configuration as TOML that `load` reads back to an equal tree."""
    lines: list[str] = []
    for section, values in config.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        lines += [line for name, value in values.items() for line in toml_lines(name, value)]
        lines.append("")
    return "\n".join(lines)


def toml_lines(name: str, value: Any) -> list[str]:
    """A setting as TOML, which has no null: one that is None is left out, and None is its default."""
    if isinstance(value, dict):
        return [line for key, item in value.items() for line in toml_lines(f"{name}.{_toml_key(key)}", item)]
    return [] if value is None else [f"{name} = {_toml_value(value)}"]


def _toml_value(value: Any) -> str:
    """Tables stand in a list, such as guards, on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, dict):
        items = (f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(items)}}}"
    return json.dumps(value, ensure_ascii=False)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)
