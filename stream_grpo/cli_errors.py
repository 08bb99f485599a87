"""How every command ends where a user can do something about it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from curator.errors import CuratorError
from stream_grpo.console import Console
from stream_grpo.errors import ConfigError, StreamGrpoError


@contextmanager
def errors(console: Console) -> Iterator[None]:
    """Show what a user can act on as one message, not as a traceback; exit code 2 for bad input, 1 for a failed run."""
    try:
        yield
    except (StreamGrpoError, CuratorError) as error:
        console.error(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        console.say("interrupted")
        sys.exit(130)
