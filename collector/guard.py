"""What a statement from the network must not say.

In: SQL. Out: nothing, or `ForbiddenError`. Invariant: together with chdb_config/users.xml, which denies files, URLs and other
servers inside the engine, no statement reaches beyond the store's own tables. The engine does not check a few things (the scalar
function `file`, `python`, INTO OUTFILE, databases over files or servers): those are refused here, by their names.

The check is blunt on purpose: it knows no comments and no literals, so it can't be led astray by them. A forbidden name
followed by a parenthesis is refused inside a literal too; text like that belongs into a query parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

ALLOWED = frozenset(
    {
        *(
            "atomic",
            "dictionary",
            "format",
            "fuzzjson",
            "fuzzquery",
            "generaterandom",
            "generateseries",
            "generate_series",
            "input",
            "loop",
        ),
        *("memory", "merge", "mergetreeanalyzeindexes", "mergetreeanalyzeindexesuuid", "mergetreecodecblockcounts", "mergetreeindex"),
        *("mergetreeprojection", "mergetreetextindex", "null", "numbers", "numbers_mt", "ordinary", "primes", "replicated"),
        *(
            "sqlstandardvalues",
            "timeseriesdata",
            "timeseriesmetricfamilies",
            "timeseriesmetrics",
            "timeseriessamples",
            "timeseriesselector",
        ),
        *("timeseriestags", "values", "view", "viewexplain", "viewifpermitted", "zeros", "zeros_mt"),
        # Table engines that keep their rows in the store. `log`, `join` and `set` are words of ordinary queries as well.
        *("mergetree", "replacingmergetree", "aggregatingmergetree", "summingmergetree", "collapsingmergetree", "coalescingmergetree"),
        *("versionedcollapsingmergetree", "graphitemergetree", "log", "tinylog", "stripelog", "set", "join", "buffer"),
        *("materializedview", "timeseries"),
    }
)
"""Table functions, database engines and table engines that reach no further than the store. All others are refused."""

_ALWAYS = frozenset({"file", "python", "eval", "disk"})
_SPACE = r"[\s\u180e\u200b-\u200d\ufeff]*"
# A comment between name and parenthesis counts as the parenthesis.
_CALL = rf"[`\"\u201d]?{_SPACE}(?:\(|/\*|--|//|\#)"
_ESCAPED_NAME_CALL = re.compile(rf"[`\"][^`\"\n]*\\[^`\"]*{_CALL}")
_CLIENT_FILES = re.compile(r"\b(?:OUTFILE|INFILE)\b", re.IGNORECASE)


class ForbiddenError(ValueError):
    """A statement names what statements from the network must not."""


class StatementGuard:
    """Knows the names that are refused."""

    def __init__(self, engine_names: Iterable[str]) -> None:
        """Refuse all of the engine's table functions and database engines that are not in ALLOWED."""
        names = ({name.lower() for name in engine_names} - ALLOWED) | _ALWAYS
        self._call = re.compile(rf"\b({'|'.join(sorted(map(re.escape, names)))}){_CALL}", re.IGNORECASE)

    def check(self, sql: str) -> None:
        """Let a statement pass.

        Raises:
            ForbiddenError: with the name.
        """
        found = self._call.search(sql)
        if found:
            raise ForbiddenError(
                f"{found.group(1)}(...) is not allowed here: it may reach beyond the store."
                " If it stands in a text, pass the text as a query parameter."
            )
        if _ESCAPED_NAME_CALL.search(sql):
            raise ForbiddenError("a quoted name with a backslash must not be called as a function")
        if _CLIENT_FILES.search(sql):
            raise ForbiddenError("INTO OUTFILE and FROM INFILE reach files of the store's machine. Send or read the rows over HTTP.")
