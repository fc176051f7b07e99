"""Guard against statements from the network that could reach beyond the store.

Invariant: together with chdb_config/users.xml, which denies files, URLs and other servers inside the database, and
`collector.confinement`, which denies files to the process, no statement reaches beyond the store's own tables. The database does not check
a few things (the scalar function `file`, `python`, INTO OUTFILE, databases and tables over files or servers): those are refused here by
their names, with a helpful message; a name that is composed of pieces is stopped by the confinement only.

The check is deliberately coarse: it does not parse comments or literals, so they cannot mislead it. A forbidden name followed by a
parenthesis is refused inside a literal too; such text belongs in a query parameter.

It takes linear time, and lets other threads run meanwhile: a statement may hold megabytes of rows, and the interpreter can't be
interrupted inside one search.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

ALLOWED = frozenset({
    "atomic", "dictionary", "format", "fuzzjson", "fuzzquery", "generaterandom", "generateseries",
    "generate_series", "input", "loop", "memory", "merge", "mergetreeanalyzeindexes",
    "mergetreeanalyzeindexesuuid", "mergetreecodecblockcounts", "mergetreeindex", "mergetreeprojection",
    "mergetreetextindex", "null", "numbers", "numbers_mt", "ordinary", "primes", "replicated",
    "sqlstandardvalues", "timeseriesdata", "timeseriesmetricfamilies", "timeseriesmetrics",
    "timeseriessamples", "timeseriesselector", "timeseriestags", "values", "view", "viewexplain",
    "viewifpermitted", "zeros", "zeros_mt",
    # Table engines that keep their rows in the store. `log`, `join`, `set` and `alias` are words of ordinary queries as well.
    "mergetree", "replacingmergetree", "aggregatingmergetree", "summingmergetree", "collapsingmergetree",
    "coalescingmergetree", "versionedcollapsingmergetree", "graphitemergetree", "log", "tinylog", "stripelog",
    "set", "join", "buffer", "materializedview", "timeseries", "alias",
})  # fmt: skip
"""Table functions, database engines and table engines that reach no further than the store. All others are refused."""

_ALWAYS = frozenset({"file", "python", "eval", "disk"})
_SPACE = r"[\s\u180e\u200b-\u200d\u2060\ufeff]*+"
# A comment between name and parenthesis counts as the parenthesis.
_CALL = rf"[`\"\u201d]?{_SPACE}(?:\(|/\*|--|//|\#)"
_ESCAPED = re.compile(r"[`\"]\w*+\\")
_ESCAPED_CALL = re.compile(rf"[\w\\]*+[`\"]{_SPACE}(?:\(|/\*|--|//|\#)")
_CLIENT_FILES = re.compile(r"\b(?:outfile|infile)\b")
_WORD_ENDS = re.compile(r"(?!\w)")
_HIDDEN = re.compile(r"[`\"\u201c][\w\\]*?\\x[\w\\]*+")
_HIDDEN_ENDS = re.compile(r"[`\"\u201d]")
_FILE = re.compile(r"\bfile")
_ARGUMENT = re.compile(rf"[`\"\u201d]?{_SPACE}(?:[,)]|/\*|--|//|\#)")
_APPLY = re.compile(r"\bapply")
_OVER_ITEMS = re.compile(r"\b(?:array|map)\w++")
"""Matches functions that take another function by its name."""
_ENGINE = re.compile(r"\bengine\b")
_WORD = re.compile(r"\w++")
_WINDOW = 1 << 16
_LONGEST_NAME = 1 << 8


class ForbiddenError(ValueError):
    """A statement uses a name that is not allowed in statements from the network."""


class StatementGuard:
    """Check of statements against the names that are refused."""

    def __init__(self, engine_names: Iterable[str]) -> None:
        """Refuse all of the database's table functions, database engines and table engines that are not in ALLOWED."""
        self._refused = ({name.lower() for name in engine_names} - ALLOWED) | _ALWAYS
        names = "|".join(sorted(map(re.escape, self._refused)))
        self._name = re.compile(rf"\b(?:{names})\b")
        self._call = re.compile(_CALL)
        # Some engines take no parentheses. A comment or an escape before the name would hide it.
        self._engine = re.compile(rf"{_SPACE}=?{_SPACE}(?:[`\"\u201c]?(?:{names})\b|[`\"]\w*+\\|/\*|--|//|\#)")

    def check(self, sql: str, parameters: Iterable[str] = (), structures: Iterable[str] = ()) -> None:
        """Raise if a statement, a value of a parameter, or the structure (columns and defaults) of a table with it uses a refused name.

        Raises:
            ForbiddenError: it does; the message has the name.
        """
        # Much faster than patterns that ignore case.
        sql = sql.lower()
        self._check(sql)
        for structure in structures:
            self._check(structure.lower())
        if "identifier" in sql and any("\\" in value or not self._refused.isdisjoint(_WORD.findall(value.lower())) for value in parameters):
            raise ForbiddenError("a parameter of type Identifier must not name what may reach beyond the store.")

    def _check(self, sql: str) -> None:
        if self._names_any(sql) and (name := _find(sql, self._name, self._call)):
            raise ForbiddenError(
                f"{name}(...) is not allowed here: it may reach beyond the store."
                " If it stands in a text, pass the text as a query parameter."
            )
        if _find(sql, _ESCAPED, _ESCAPED_CALL):
            raise ForbiddenError("a quoted name with a backslash must not be called as a function")
        if "file" in sql and _find(sql, _FILE, _WORD_ENDS) and self._is_handed_on(sql):
            raise ForbiddenError(
                "the word file is not allowed beside APPLY, nor as an argument where there are functions of arrays or maps: the"
                " function of that name reads files. If it stands in a text, pass the text as a query parameter; a column has to have"
                " another name."
            )
        if "\\x" in sql and _find(sql, _HIDDEN, _HIDDEN_ENDS):
            raise ForbiddenError("a quoted name must not have letters written as numbers")
        # A search for a word costs a hundredth of one by a pattern.
        if ("outfile" in sql or "infile" in sql) and _find(sql, _CLIENT_FILES, _WORD_ENDS):
            raise ForbiddenError("INTO OUTFILE and FROM INFILE reach files of the store's machine. Send or read the rows over HTTP.")
        if "engine" in sql and _find(sql, _ENGINE, self._engine):
            raise ForbiddenError(
                "this table engine is not allowed here, or hides behind a comment or an escape. Name one that keeps its rows."
            )

    @staticmethod
    def _is_handed_on(sql: str) -> bool:
        """Return whether another function may call the function named `file`."""
        as_argument = _find(sql, _FILE, _ARGUMENT) and _find(sql, _OVER_ITEMS, _WORD_ENDS)
        return bool(as_argument or _find(sql, _APPLY, _WORD_ENDS))

    def _names_any(self, sql: str) -> bool:
        """Return whether any word is a refused name: in most statements none is, and this takes a third of the time of the patterns."""
        return any(not self._refused.isdisjoint(_WORD.findall(sql, start, end)) for start, end in _windows(sql))


def _windows(sql: str) -> Iterator[tuple[int, int]]:
    """Return the bounds of overlapping windows, so that each name is whole in one of them."""
    return ((start, start + _WINDOW + _LONGEST_NAME) for start in range(0, len(sql), _WINDOW))


def _find(sql: str, head: re.Pattern[str], tail: re.Pattern[str]) -> str | None:
    """Return the first text, at most _LONGEST_NAME long, that matches `head` and is followed by a match of `tail`, of any length."""
    for start, end in _windows(sql):
        for match in head.finditer(sql, start, end):
            if tail.match(sql, match.end()):
                return match.group()
    return None
