"""The commands `ledger` and `rollouts`: what is read goes to the console, or out as plain values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stream_grpo.config_file import load_run
from stream_grpo.console import Console
from stream_grpo.rollouts import text
from stream_grpo.rollouts.export import write_parquet
from stream_grpo.rollouts.missing import what_is_missing
from stream_grpo.rollouts.views import Filters, find, journal_of, newest_lines, read_account


def account_of(run: Path) -> dict[str, Any]:
    """The account of a run as plain values."""
    account, lineage = read_account(journal_of(run))
    return account.as_fields() | {
        "learner": lineage.version,
        "ends": dict(account.ends),
        "gap": account.gap(),
        "missing": what_is_missing(journal_of(run)),
    }


def show_account(run: Path, console: Console) -> bool:
    """Show the account of a run; whether it closes and no file of the journal is missing."""
    account, lineage = read_account(journal_of(run))
    console.say(f"{run}: learner at {lineage.version or 'no version yet'}")
    console.table(text.ACCOUNT_COLUMNS, text.account_rows(account), numbers=text.ACCOUNT_COLUMNS[1:])
    if account.ends:
        console.table(
            ("end", "groups"), [(end, f"{n:,}") for end, n in account.ends.most_common()], numbers=("groups",)
        )
    gap = account.gap()
    missing = say_missing(run, console)
    console.say(f"DOES NOT CLOSE: {gap}" if gap else "closes")
    return not (gap or missing)


def say_missing(run: Path, console: Console) -> bool:
    """Say what is missing of the journal, and what that means for what is shown; whether anything is."""
    missing = what_is_missing(journal_of(run))
    for sentence in missing:
        console.say(f"MISSING: {sentence}")
    return bool(missing)


def groups_of(run: Path, filters: Filters, limit: int) -> list[dict[str, Any]]:
    """The newest groups that pass, oldest first, as plain values."""
    return list(map(text.plain, newest_lines(journal_of(run), filters, limit)))


def show_groups(run: Path, filters: Filters, limit: int, console: Console) -> None:
    """Show the newest groups that pass, the newest last."""
    lines = newest_lines(journal_of(run), filters, limit)
    console.table(text.COLUMNS, map(text.cells, lines), numbers=text.NUMBERS)
    if not lines:
        console.say("no such group has come in, or its segment has left the disk")
    say_missing(run, console)


def show_group(run: Path, group_id: str, console: Console, *, with_tokens: bool) -> None:
    """Show one group with prompt and completions, by the tokenizer of the run."""
    say_missing(run, console)
    line, data = find(journal_of(run), group_id)
    for style, block in text.group_text(line, data, decoder(run), with_tokens=with_tokens):
        console.block(style, block)


def decoder(run: Path) -> text.Decode:
    """How the tokenizer of a run reads tokens."""
    from stream_grpo.sampler.prompts import load_tokenizer  # takes seconds, and a list of groups needs none

    tokenizer = load_tokenizer(load_run(run.resolve()).model.path)
    decode: Callable[..., str] = tokenizer.decode
    return lambda ids: decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def export(run: Path, filters: Filters, path: Path, limit: int | None, console: Console) -> None:
    """Write groups to a Parquet file."""
    num_groups = write_parquet(journal_of(run), filters, path, limit)
    console.say(f"{path}: {num_groups:,} groups, a row a rollout")
    say_missing(run, console)
