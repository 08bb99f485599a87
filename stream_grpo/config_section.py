"""What every part of the tree of `config` is: a frozen model that knows its fields. Loads no torch."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen part of the tree."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def settings(section: Section) -> dict[str, Any]:
    """A section as plain values, for hashes."""
    return section.model_dump(mode="json")
