"""Rules that are Python functions: `python`.

Invariant: the function that runs is the one whose source file the rule's hash is of; its failure ends the build of its rollouts before
a row is written.

A function takes a Polars DataFrame, a row a call, and returns a number a row, in the same order: a Series, a list, a NumPy array, or an
expression, which is evaluated over the calls of each attempt as an `expression` rule is. Null is no reward.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from spangrad import callables
from spangrad.errors import AgentError, RuleError
from spangrad.settings import AirRule
from transition_builder.rewards.rules.columns import COLUMNS, IDENTITY
from transition_builder.rewards.rules.rule_input import RuleInput
from transition_builder.schemas import ATTEMPT, SPAN

_loaded: dict[Path, str] = {}
"""Source files of the loaded functions -> hashes of their content at that time."""


def python(rule: AirRule, rule_input: RuleInput) -> pl.DataFrame:
    """Return the value that the function rule.where gives for each call, times the reward; calls for which it is null get nothing.

    Raises:
        RuleError: the function raised, or returned something else than a number or null for each call.
    """
    calls = rule_input.columns.select(*IDENTITY, *(COLUMNS if rule.columns is None else rule.columns))
    spans = rule_input.columns[["CallId", *SPAN]]
    if calls.is_empty():
        return spans.with_columns(Value=pl.lit(None, pl.Float64))
    values = _numbers(rule, _returned(rule, load(rule), calls), calls)
    return spans.with_columns(Value=values * rule.reward).filter(pl.col("Value").is_not_null())


def load(rule: AirRule) -> Callable[[pl.DataFrame], Any]:
    """Import the function that a rule names, anew where its source file has changed since it was imported.

    Raises:
        RuleError: there is no such function, or its module cannot be imported.
    """
    reference = rule.where or ""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        file = callables.source_file(reference)
        version = hashlib.sha256(file.read_bytes()).hexdigest()
        if _loaded.get(file, version) != version:
            _forget(file)
        function = callables.load(reference)
    except AgentError as error:
        raise RuleError(f"the rule {rule.name!r} is the function {reference!r}, which cannot be used: {error}") from error
    _loaded[file] = version
    return function


def _forget(file: Path) -> None:
    """Make the next import read a source file again."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == str(file):
            del sys.modules[name]
    # Python does not detect an edit within a second that keeps the length of the file.
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def _returned(rule: AirRule, function: Callable[[pl.DataFrame], Any], calls: pl.DataFrame) -> Any:
    try:
        result = function(calls)
        return calls.select(result.over(ATTEMPT).alias("value"))["value"] if isinstance(result, pl.Expr) else result
    except Exception as error:  # it runs the user's code
        frames, file = traceback.extract_tb(error.__traceback__), str(callables.source_file(rule.where or ""))
        at = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
        raise _error(rule, f"raised {type(error).__name__}: {error} (line {at.lineno} of {at.filename})") from error


def _numbers(rule: AirRule, result: Any, calls: pl.DataFrame) -> pl.Series:
    """Return the result of a function as numbers."""
    if not isinstance(result, pl.Series | list | tuple | np.ndarray):
        raise _error(rule, f"returned {type(result).__name__}")
    try:
        values = result if isinstance(result, pl.Series) else pl.Series(result)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
        raise _error(rule, f"returned a {type(result).__name__} that holds other than numbers: {error}") from error
    if values.len() != calls.height:
        raise _error(rule, f"returned {values.len()} values for {calls.height} calls")
    if not (values.dtype.is_numeric() or values.dtype in (pl.Boolean(), pl.Null())):
        raise _error(rule, f"returned values of type {values.dtype}")
    return values.cast(pl.Float64)


def _error(rule: AirRule, what: str) -> RuleError:
    return RuleError(
        f"the rule {rule.name!r} is the function {rule.where!r}, which {what}. Fix it: it must return a Series, an expression or a list "
        "with one number, or null for no reward, for each row of its argument, in their order. Nothing was written of the rollouts that it "
        "was called for; they are built when the function works."
    )
