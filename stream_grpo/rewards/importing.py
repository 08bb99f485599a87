"""Imports functions of the user's as a worker does, in a process of its own, and says what is wrong with each.

One line of JSON for each, in their order: [name, reason], the reason empty where there is nothing.
"""

from __future__ import annotations

import json
import os
import sys

from stream_grpo.errors import ConfigError
from stream_grpo.rewards.user import load_user_verifier


def main() -> None:
    """Its one argument: JSON of [names, folder in which modules are looked for after the path]."""
    names, folder = json.loads(sys.argv[1])
    sys.path.append(folder)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what a module prints is no answer
        for name in names:
            print(json.dumps([name, _wrong_with(name)]), file=out, flush=True)
    os._exit(0)  # threads that a module has started are not waited for


def _wrong_with(name: str) -> str:
    try:
        load_user_verifier(name)
    except ConfigError as error:
        return str(error)
    except BaseException as error:  # SystemExit included: a module may be anyone's code
        return f"its module cannot be imported: {type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
