"""An environment by its name: built in, the user's own, or one of the `verifiers` package."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from stream_grpo.environments import calculator, records
from stream_grpo.environments.calls import CallFormat
from stream_grpo.environments.protocol import Factory
from stream_grpo.errors import ConfigError
from stream_grpo.rewards.user import PREFIX as USER
from stream_grpo.rewards.user import source_version

VERIFIERS = "verifiers:"
"""Before the id of an environment of that package, as its `load_environment` takes it."""

BUILT_IN: Mapping[str, tuple[Any, str]] = {
    calculator.NAME: (calculator.Calculator, calculator.VERSION),
    records.NAME: (records.Records, records.VERSION),
}
"""The class of each, and the version of its rules."""


def load(name: str, options: Mapping[str, Any]) -> Factory:
    """What makes the environment of a problem; imports whatever it needs, so that it belongs into a worker.

    A user's `python:module.name` is called with the problem and the options, and gives an environment. Raises
    ConfigError for a name that stands for none.
    """
    if name.startswith(USER):
        module_name, _, attribute = name.removeprefix(USER).rpartition(".")
        version_of(name)
        made = getattr(importlib.import_module(module_name), attribute, None)
        if not callable(made):
            raise ConfigError(f"environment {name!r}: module {module_name!r} has no {attribute!r} that can be called")
        return partial(made, **options)
    if name.startswith(VERIFIERS):
        from stream_grpo.environments.verifiers_adapter import load_adapter

        return load_adapter(name.removeprefix(VERIFIERS), options)
    _require_built_in(name)
    return partial(BUILT_IN[name][0], **options)


def check_named(name: str | None, options: Mapping[str, Any], paths: Sequence[str] = ()) -> None:
    """Refuse an environment that is not there, and options that a built-in one does not take. Imports no user's code.

    Raises ConfigError.
    """
    if name is None:
        return
    version_of(name, paths)
    if name not in BUILT_IN:
        return
    made_by = BUILT_IN[name][0]
    known = list(inspect.signature(made_by).parameters)[1:]
    if unknown := sorted(options.keys() - known):
        raise ConfigError(f"environment.options: {name} has no {unknown[0]!r}; it takes {', '.join(known)}")
    try:
        made_by.call_format(**options)
    except ValueError as error:
        raise ConfigError(f"environment.options: {error}") from error


def grammar_of(name: str, options: Mapping[str, Any], paths: Sequence[str] = ()) -> str:
    """What an action of an environment may look like, as JSON of a structural tag (xgrammar's `StructuralTag`).

    Raises ConfigError as `call_format_of`.
    """
    form = call_format_of(name, options, paths)
    return json.dumps(form.structural_tag() if isinstance(form, CallFormat) else form)


def call_format_of(name: str, options: Mapping[str, Any], paths: Sequence[str] = ()) -> CallFormat | dict[str, Any]:
    """How a call of an environment is written: a `CallFormat`, or a structural tag for any other form.

    An environment offers it by `call_format`, called with the options. A user's module is imported for it, looked for
    at `paths` after everything else. Raises ConfigError where there is none, or where the user's code fails.
    """
    try:
        offers = None if name.startswith(VERIFIERS) else getattr(_named(name, paths), "call_format", None)
    except ConfigError:
        raise
    except Exception as error:  # a module may be anyone's code
        raise ConfigError(
            f"environment {name!r}: its module cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if offers is None:
        raise ConfigError(
            f"environment.grammar = true: environment {name!r} does not say how a call is written, so that there is "
            f"no grammar; use false, or an environment with `call_format`"
        )
    try:
        form = offers(**options)
        if isinstance(form, CallFormat):
            return form
        plain: dict[str, Any] = json.loads(json.dumps(dict(form)))
        return plain
    except Exception as error:  # so may this be
        raise ConfigError(
            f"environment.grammar = true: call_format of environment {name!r}: {type(error).__name__}: {error}"
        ) from error


def _named(name: str, paths: Sequence[str]) -> Any:
    """What an environment is made by."""
    where = list(sys.path)
    sys.path.extend(paths)
    try:
        factory = load(name, {})
    finally:
        sys.path[:] = where
    return factory.func if isinstance(factory, partial) else factory


def version_of(name: str, paths: Sequence[str] = ()) -> str:
    """The version of an environment's rules, without importing it: of a user's, the hash of its module.

    `paths`: where a user's module is looked for after everything else. Raises ConfigError where it is not there.
    """
    if name.startswith(USER):
        return source_version(name, paths)
    if name.startswith(VERIFIERS):
        if find_spec("verifiers") is None:
            raise ConfigError(f"environment {name!r}: the package 'verifiers' is not installed")
        return f"verifiers {metadata.version('verifiers')}"
    _require_built_in(name)
    return BUILT_IN[name][1]


def _require_built_in(name: str) -> None:
    if name not in BUILT_IN:
        known = [*sorted(BUILT_IN), f"{USER}module.name", f"{VERIFIERS}id"]
        raise ConfigError(f"no environment is called {name!r}; known: {', '.join(known)}")
