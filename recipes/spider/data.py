"""Spider: questions, databases, the reward; and small data in the same schema (`db_id`, `question`, `query`; DB_ID/DB_ID.sqlite)."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from recipes.recipe import Recipe, Row, SmallData
from recipes.spider.database import rows, schema
from spangrad.errors import AgentError

COUNTRIES = ("france", "italy", "japan", "peru")
AGES = (25, 35, 45, 55)


def tasks(data: Iterable[Row], databases: Path) -> list[dict[str, Any]]:
    """Return the agent's inputs: each question with its database and the query that answers it.

    Raises:
        AgentError: a database is not there.
    """
    schema_of = cache(schema)
    inputs = list[dict[str, Any]]()
    for row in data:
        file = databases / row["db_id"] / f"{row['db_id']}.sqlite"
        if not file.is_file():
            raise AgentError(f"{file} is not there. Unpack Spider's own archive (yale-lily.github.io/spider) and name its --databases.")
        inputs.append({"question": row["question"], "schema": schema_of(file), "database": str(file.absolute()), "query": row["query"]})
    return inputs


def evaluate(given: Mapping[str, Any], output: Mapping[str, Any]) -> float:
    """Return 1 where the last query finds what the right one finds, else 0."""
    result = rows(given["database"], output["query"])
    return float(result is not None and result == rows(given["database"], given["query"]))


def small(directory: Path) -> SmallData:
    """Write a database of singers, and return questions of two patterns."""
    file = directory / "database" / "singers" / "singers.sqlite"
    file.parent.mkdir(parents=True)
    rng = random.Random(0)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("create table singer ( sid int , country text , age int )")
        singers = [(number, rng.choice(COUNTRIES), rng.randint(18, 70)) for number in range(40)]
        connection.executemany("insert into singer values (?, ?, ?)", singers)
        connection.commit()
    data: list[Row] = [{"db_id": "singers", "question": f"how many singers from {name}", "query": by_country(name)} for name in COUNTRIES]
    data += [{"db_id": "singers", "question": f"how many singers older than {age}", "query": by_age(age)} for age in AGES]
    return data, data[::2], {"databases": directory / "database"}


def by_country(country: str) -> str:
    """Return a small query that the tiny model's words spell."""
    return f"select count(*) from singer where country = '{country}'"


def by_age(age: int) -> str:
    """Return a small query that the tiny model's words spell."""
    return f"select count(*) from singer where age > {age}"


RECIPE = Recipe(
    name="spider",
    train="hf:xlangai/spider:train",
    held_out="hf:xlangai/spider:validation",
    inputs=lambda rows, arguments, directory: tasks(rows, arguments.databases),
    small=small,
    options=lambda parser: parser.add_argument(
        "--databases", type=Path, default=Path("data/spider/database"), help="Spider's databases, which the hub does not have"
    ),
)
