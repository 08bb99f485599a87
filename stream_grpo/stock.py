"""Requests on a small stock, to be done by SQL: what is asked, and the database that it is asked of. No torch.

    set bolt 407:      the stock has 407 bolts from now on
    add bolt 407:      a new row of the stock
    drop bolt nut:     two rows that go
    move 42 bolt nut:  42 fewer bolts, 42 more nuts
    copy bolt nut:     as many nuts as bolts; how many these are, the policy has to read
    restore bolt 37:   as many bolts as entry 37 of the ledger says, which has to be read too

The table `ledger` is protected. The goal of a request is the whole table `stock` as it must be at the end. A request's
database and the side of the held-out split on which it stands follow from its prompt alone, the same for every seed: no
held-out prompt is in the pool or in the training data of the small model. These two share the other side.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import permutations, product
from typing import Any, NamedTuple, TypedDict

ITEMS = (
    *("axle", "bolt", "brush", "cable", "chain", "clip", "disk", "fuse", "gear", "hinge", "hook", "lamp"),
    *("lens", "lever", "nut", "pipe", "plug", "pump", "rope", "spring", "tube", "valve", "washer", "wheel"),
)
STOCK, LEDGER = "stock", "ledger"
"""The tables; the second is protected."""
HELD_OUT_ONE_IN = 10
"""One prompt in so many is held out."""
NUM_ROWS, NUM_ENTRIES = 5, 3
"""Of stock and ledger at the start."""

POOL_COUNTS: Mapping[str, int] = {"set": 500, "add": 500, "drop": 400, "move": 600, "copy": 450, "restore": 600}
"""Problems by kind."""
HELD_OUT_COUNTS: Mapping[str, int] = {"set": 80, "add": 80, "drop": 80, "move": 80, "copy": 80, "restore": 80}
"""Held-out problems by kind; of `drop` and `copy` there are fewer, and all of them are taken."""

_AMOUNTS, _TWO_DIGITS = range(100, 1000), range(10, 100)


class Row(TypedDict):
    """One line of a problem file."""

    id: str
    prompt: str
    answer: str
    """The statements of a reference solution. The end state decides, not this text."""
    verifier: str
    domain: str
    setup: str
    goal: list[list[Any]]
    milestones: dict[str, list[Any]]
    protected: list[str]


class Request(NamedTuple):
    """What is asked."""

    kind: str
    items: tuple[str, ...]
    number: int | None = None
    """An amount; of `restore` the entry."""


class Tables(NamedTuple):
    """A database as a request finds it."""

    amounts: dict[str, int]
    """Of the stock, by item."""
    entries: dict[int, tuple[str, int]]
    """Of the ledger: item and amount by number."""


def prompt_of(request: Request) -> str:
    """The prompt, "move 42 bolt nut:"."""
    number = [] if request.number is None else [str(request.number)]
    words = [*number, *request.items] if request.kind == "move" else [*request.items, *number]
    return f"{request.kind} {' '.join(words)}:"


def is_held_out(request: Request) -> bool:
    """Whether the request is held out: from a hash of its prompt."""
    digest = hashlib.sha256(prompt_of(request).encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def domain_of(kind: str) -> str:
    """The domain of the requests of a kind."""
    return f"stock-{kind}"


@lru_cache(maxsize=16)
def tables_of(request: Request) -> Tables:
    """The start state. No two amounts of stock and ledger are equal, and none is that which the request names."""
    rng = random.Random(prompt_of(request))
    named = () if request.kind == "add" else request.items
    items = [*named, *rng.sample([item for item in ITEMS if item not in request.items], NUM_ROWS - len(named))]
    rng.shuffle(items)
    amounts = rng.sample([amount for amount in _AMOUNTS if amount != request.number], NUM_ROWS + NUM_ENTRIES)
    numbers = rng.sample([number for number in _TWO_DIGITS if number != request.number], NUM_ENTRIES)
    if request.kind == "restore" and request.number is not None:
        numbers[rng.randrange(NUM_ENTRIES)] = request.number
    noted = rng.sample([item for item in ITEMS if item != request.items[0]], NUM_ENTRIES)
    if request.number in numbers:
        noted[numbers.index(request.number)] = request.items[0]
    return Tables(
        amounts=dict(zip(items, amounts[:NUM_ROWS], strict=True)),
        entries=dict(zip(numbers, zip(noted, amounts[NUM_ROWS:], strict=True), strict=True)),
    )


def target_of(request: Request) -> dict[str, int]:
    """The amounts of the stock at the end, by item."""
    tables, items, number = tables_of(request), request.items, request.number or 0
    amounts = dict(tables.amounts)
    if request.kind in ("set", "add"):
        amounts[items[0]] = number
    elif request.kind == "drop":
        del amounts[items[0]], amounts[items[1]]
    elif request.kind == "move":
        amounts[items[0]] -= number
        amounts[items[1]] += number
    elif request.kind == "copy":
        amounts[items[1]] = amounts[items[0]]
    else:
        amounts[items[0]] = tables.entries[number][1]
    return amounts


class Plan(NamedTuple):
    """How a request is done."""

    read: tuple[str, str] | None
    """Table and key of what has to be read first; None: nothing."""
    changes: tuple[tuple[str, str | None], ...]
    """Item and number of each change, the number of `move` with its sign; None: what was read."""


def plan_of(request: Request) -> Plan:
    """The only plan that the teacher knows."""
    items, number = request.items, str(request.number)
    if request.kind == "copy":
        return Plan((STOCK, items[0]), ((items[1], None),))
    if request.kind == "restore":
        return Plan((LEDGER, number), ((items[0], None),))
    if request.kind == "move":
        return Plan(None, ((items[0], f"-{number}"), (items[1], f"+{number}")))
    return Plan(None, tuple((item, number) for item in items))


def read_by(table: str, key: str) -> str:
    """The query for the amount of an item, or of an entry by its number."""
    return f"select num from {table} where " + (f"id={key}" if key.isdigit() else f"item='{key}'")


def change_by(kind: str, table: str, item: str, number: str) -> str:
    """The statement that changes one row."""
    if kind == "add":
        return f"insert into {table} values('{item}',{number})"
    if kind == "drop":
        return f"delete from {table} where item='{item}'"
    return f"update {table} set num={'num' if kind == 'move' else ''}{number} where item='{item}'"


def draw(kind: str, rng: random.Random, *, held_out: bool) -> Request:
    """A request of the kind, uniform over those on the asked side of the held-out split."""
    while True:
        items = tuple(rng.sample(ITEMS, _NUM_ITEMS[kind]))
        numbers = _NUMBERS.get(kind)
        request = Request(kind, items, None if numbers is None else rng.choice(numbers))
        if is_held_out(request) == held_out:
            return request


_NUM_ITEMS: Mapping[str, int] = {"set": 1, "add": 1, "drop": 2, "move": 2, "copy": 2, "restore": 1}
_NUMBERS: Mapping[str, range] = {"set": _AMOUNTS, "add": _AMOUNTS, "move": _TWO_DIGITS, "restore": _TWO_DIGITS}


def rows(counts: Mapping[str, int], seed: int, *, held_out: bool) -> list[Row]:
    """Distinct problems, `counts[kind]` of each kind or as many as there are, on the asked side of the held-out split;
    in a seeded order."""
    rng, made = random.Random(seed), list[Row]()
    for kind, count in counts.items():
        known = [request for request in _all(kind) if is_held_out(request) == held_out]
        made += map(row_of, rng.sample(known, min(count, len(known))))
    rng.shuffle(made)
    return made


def _all(kind: str) -> Iterator[Request]:
    for items, number in product(permutations(ITEMS, _NUM_ITEMS[kind]), _NUMBERS.get(kind, (None,))):
        yield Request(kind, items, number)


def row_of(request: Request) -> Row:
    """The problem: what the environment `records` needs, and a reference solution."""
    target = sorted(target_of(request).items())
    return Row(
        id=f"{domain_of(request.kind)}:{prompt_of(request).partition(' ')[2].removesuffix(':').replace(' ', '-')}",
        prompt=prompt_of(request),
        answer="; ".join(reference_of(request)),
        verifier="environment",
        domain=domain_of(request.kind),
        setup=_setup(tables_of(request)),
        goal=[[f"select item,num from {STOCK} order by item", [list(pair) for pair in target]]],
        milestones=_milestones(request),
        protected=[LEDGER],
    )


def reference_of(request: Request) -> list[str]:
    """The statements of the plan, with what they read."""
    plan, target = plan_of(request), target_of(request)
    changes = [
        change_by(request.kind, STOCK, item, str(target[item]) if number is None else number)
        for item, number in plan.changes
    ]
    return changes if plan.read is None else [read_by(*plan.read), *changes]


def _setup(tables: Tables) -> str:
    amounts = ",".join(f"('{item}',{amount})" for item, amount in tables.amounts.items())
    entries = ",".join(f"({number},'{item}',{amount})" for number, (item, amount) in tables.entries.items())
    return (
        f"create table {STOCK}(item text,num int);insert into {STOCK} values{amounts};"
        f"create table {LEDGER}(id int,item text,num int);insert into {LEDGER} values{entries};"
    )


def _milestones(request: Request) -> dict[str, list[Any]]:
    """Each of two changes by itself, by name; none where there is but one."""
    target, names = target_of(request), {"drop": ("first", "second"), "move": ("taken", "given")}
    checks = [
        [f"select num from {STOCK} where item='{item}'", [[target[item]]] if item in target else []]
        for item in request.items
    ]
    return dict(zip(names.get(request.kind, ()), checks, strict=False))
