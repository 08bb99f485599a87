"""The outside of a sampler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sampler.loop import Outside


@pytest.fixture
def outside() -> Iterator[Outside]:
    servers = Outside()
    yield servers
    servers.close()
