"""The database that is asked: singers, albums and concerts in SQLite, the same for every seed.

In: a query. Out: its rows, in an order of their own, or None where it is refused. Invariant: as `queries.py`; threads ask one after the
other, as one connection needs it.
"""

from __future__ import annotations

import random
import sqlite3
import threading
from functools import cache, lru_cache

from examples.text_to_sql.queries import Rows, restrict, sorted_rows

COUNTRIES = ("france", "italy", "japan", "brazil", "kenya", "norway", "peru", "egypt")
GENRES = ("jazz", "rock", "folk", "soul", "punk", "opera")
CITIES = ("paris", "rome", "oslo", "lima", "cairo", "tokyo")
SINGERS = 80
OTHERS = 240
"""Albums, and concerts."""
LONGEST = 2_000_000
"""Instructions of SQLite's machine."""

_ONE = threading.Lock()


@cache
def _database() -> sqlite3.Connection:
    rng = random.Random(0)
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.executescript(
        "create table singer(sid integer primary key, name text, country text, age int);"
        "create table album(aid integer primary key, sid int, title text, genre text, price int);"
        "create table concert(cid integer primary key, sid int, city text, year int);"
    )
    singers = [(number, f"s{number}", rng.choice(COUNTRIES), rng.randint(18, 70)) for number in range(SINGERS)]
    albums = [(number, rng.randrange(SINGERS), f"t{number}", rng.choice(GENRES), rng.randint(5, 60)) for number in range(OTHERS)]
    concerts = [(number, rng.randrange(SINGERS), rng.choice(CITIES), rng.randint(1980, 2020)) for number in range(OTHERS)]
    database.executemany("insert into singer values(?, ?, ?, ?)", singers)
    database.executemany("insert into album values(?, ?, ?, ?, ?)", albums)
    database.executemany("insert into concert values(?, ?, ?, ?)", concerts)
    database.commit()
    restrict(database, LONGEST)
    return database


@lru_cache(maxsize=100_000)
def rows(query: str) -> Rows | None:
    """Return the rows that a query finds, sorted; None where it is no query or is refused."""
    if not query.startswith("select "):
        return None
    with _ONE:
        return sorted_rows(_database(), query)


def outcome(query: str) -> str:
    """Return the outcome of running a query, in a word: error, empty or rows."""
    selected = rows(query)
    if selected is None:
        return "error"
    return "rows" if selected and selected != ((None,),) else "empty"
