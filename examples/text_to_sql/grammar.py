"""Grammar of the questions, and the query that answers each.

In: a random generator. Out: a question in words and the four parts of its query: what is selected, from where, under which condition, with
which value. Invariant: 16 of the 84 patterns (aggregate, tables, condition) are held out, and drawn only where they are asked for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from examples.text_to_sql.database import CITIES, COUNTRIES, GENRES

AGGREGATES = {"list the": "", "how many": "count", "average {number} of": "avg", "total {number} of": "sum"}
"""Beginning of a question -> SQL's function; none: the rows themselves."""
LABELS = {"singer": "name", "album": "title", "concert": "city"}
NUMBERS = {"singer": "age", "album": "price", "concert": "year"}
RANGES = {"age": (22, 66), "price": (8, 56), "year": (1984, 2016)}
LINKS = {
    ("singer", "album"): "with albums",
    ("singer", "concert"): "with concerts",
    ("album", "singer"): "by singers",
    ("concert", "singer"): "by singers",
}


@dataclass(frozen=True)
class Condition:
    """A condition in words and in SQL."""

    words: str
    column: str
    operator: str
    values: tuple[str, ...] = ()
    """Empty: numbers of the column's range."""

    def value(self, rng: random.Random) -> str:
        """Draw one."""
        return rng.choice(self.values) if self.values else str(rng.randint(*RANGES[self.column]))


def _quoted(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"'{word}'" for word in words)


CONDITIONS = {
    "singer": (
        Condition("from", "country", "=", _quoted(COUNTRIES)),
        Condition("older than", "age", ">"),
        Condition("younger than", "age", "<"),
    ),
    "album": (
        Condition("of style", "genre", "=", _quoted(GENRES)),
        Condition("dearer than", "price", ">"),
        Condition("cheaper than", "price", "<"),
    ),
    "concert": (
        Condition("in", "city", "=", _quoted(CITIES)),
        Condition("after", "year", ">"),
        Condition("before", "year", "<"),
    ),
}


@dataclass(frozen=True)
class Pattern:
    """Pattern of a question: all of it but the value."""

    begins: str
    table: str
    asked_of: str
    """The table of the condition; another one than `table` is joined."""
    condition: Condition

    def parts(self, value: str) -> tuple[str, str, str, str]:
        """Return the parts of its query."""
        function, tables = AGGREGATES[self.begins], self.table
        if self.asked_of != self.table:
            tables = f"{self.table} natural join {self.asked_of}"
        selected = LABELS[self.table] if not function else "count ( * )" if function == "count" else f"{function} ( {NUMBERS[self.table]} )"
        return selected, tables, f"{self.condition.column} {self.condition.operator}", value

    def text(self, value: str) -> str:
        """The question."""
        begins, link = self.begins.format(number=NUMBERS[self.table]), LINKS.get((self.table, self.asked_of), "")
        return " ".join(f"{begins} {self.table}s {link} {self.condition.words} {value}".split())


PATTERNS = tuple(
    Pattern(begins, table, other, condition)
    for begins in AGGREGATES
    for table in LABELS
    for other in LABELS
    if table == other or (table, other) in LINKS
    for condition in CONDITIONS[other]
)
_held = frozenset(random.Random(5).sample(range(len(PATTERNS)), 16))
HELD_OUT = tuple(pattern for number, pattern in enumerate(PATTERNS) if number in _held)
TRAINED = tuple(pattern for number, pattern in enumerate(PATTERNS) if number not in _held)


def query(parts: Sequence[str]) -> str:
    """The query of four parts."""
    return f"select {parts[0]} from {parts[1]} where {parts[2]} {parts[3]}"


def split(sql: str) -> tuple[str, str, str] | None:
    """Return the clauses of a query: select, from, where; None where it has not this form."""
    selected, come, rest = sql.removeprefix("select ").partition(" from ")
    tables, where, condition = rest.partition(" where ")
    return (selected, tables, condition) if sql.startswith("select ") and come and where else None


def verdict(sql: str, parts: Sequence[str]) -> str:
    """Return the verdict on a query, beside the parts of the right one: ok, or wrong and the first part that differs."""
    clauses = split(sql)
    if clauses is None:
        return "wrong sql"
    for name, clause, right in zip(("select", "from", "where"), clauses, (parts[0], parts[1], f"{parts[2]} {parts[3]}"), strict=True):
        if clause != right:
            return f"wrong {name}"
    return "ok"


VERDICTS = ("ok", "wrong select", "wrong from", "wrong where", "wrong sql")

_WORDS = """
write fix check sql question : checker ok wrong select from where error empty rows ( ) * natural join = > < count avg sum
list the how many average total of with by age price year singers albums concerts singer album concert name title city country genre
older younger than style dearer cheaper in after before
"""
WORDS = (
    *_WORDS.split(),
    *(value for conditions in CONDITIONS.values() for condition in conditions for value in condition.values),
    *map(str, range(5, 71)),
    *map(str, range(1980, 2021)),
)
"""Every word that a conversation can hold."""
