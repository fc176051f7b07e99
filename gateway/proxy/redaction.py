"""Redaction: removes what must not be stored from a call's span before it is written anywhere.

In: the texts and attributes of a call's span, with the JSON of streams assembled. Out: the same with `[redacted]` in place of what the
rules match. Invariant: a call in which something was replaced keeps no token ids or logprobs, for they spell it, unless
`gateway.redact_keep_ids` is set; a text that cannot be parsed well enough to apply a rule is replaced whole.

Rules are applied to strings as a reader sees them: a whole answer and not a stream's parts, characters and not JSON's escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from spangrad import semconv
from spangrad.errors import SettingsError
from spangrad.settings import GatewaySettings

MARK = "[redacted]"
ESCAPE_LEVELS = 8
"""Levels of escapes (of JSON within strings of JSON) down to which the rules are applied."""

_JSON = (semconv.REQUEST_JSON, semconv.RESPONSE_JSON)
_NOT_TEXT = frozenset(
    {
        # Our own, or the rollout's id, without which the call belongs to no rollout.
        semconv.RUN_ID,
        semconv.BACKEND_NAME,
        semconv.ROLLOUT_ID,
        semconv.ROLLOUT_MODE,
        semconv.PROCESS_ID,
        semconv.GEN_AI_OPERATION,
        semconv.GEN_AI_PROVIDER,
        semconv.HTTP_ROUTE,
        semconv.POLICY_NAME,
        semconv.POLICY_VERSIONS,
        semconv.TOKENIZER_HASH,
        semconv.ERROR_TYPE,
        semconv.RELAXED,
        semconv.MODALITY,
    }
)
_ARRAYS_THAT_SPELL = frozenset({"logprobs", "prompt_logprobs", "prompt_token_ids", "token_ids", "tokens"})
_ESCAPE = re.compile(r'\\(?:u([0-9a-fA-F]{4})|(["\\/bfnrt]))')
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\*|\d+)\]")

_Path = tuple[str | int, ...]


class Redactor:
    """The rules of `gateway.redact` and `gateway.redact_paths`."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Read the rules.

        Raises:
            SettingsError: one is no regular expression, matches the empty text, or is no path; the message names it.
        """
        self.expressions = tuple(_expression(rule) for rule in settings.redact)
        self.paths = tuple(_path(rule) for rule in settings.redact_paths)
        self._keeps_ids = settings.redact_keep_ids

    def redact(self, name: str, message: str, attributes: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
        """Replace what the rules match in a span's name, status message and attributes, of which token ids and logprobs are bytes.

        Where something was replaced, the attributes have `spangrad.redacted`.
        """
        redaction = _Redaction(self)
        name, message = redaction.text(name), redaction.text(message)
        kept: dict[str, Any] = {}
        for key, value in attributes.items():
            if key in _NOT_TEXT:
                kept[key] = value
            else:
                kept[key] = redaction.json(cast("str", value)) if key in _JSON and value else redaction.plain(value)
        if redaction.matched and not self._keeps_ids:
            kept = {key: value for key, value in kept.items() if not isinstance(value, bytes)}
        for key in _JSON:
            if attributes.get(key):
                kept[key] = _encoded(kept[key] if self._keeps_ids or not redaction.matched else _without_ids(kept[key]))
        if redaction.matched_by_path and kept.get(semconv.ERROR_TYPE) is not None:
            # Errors repeat values of the request, anywhere in their text.
            message = kept[semconv.RESPONSE_JSON] = MARK
        if redaction.matched:
            kept[semconv.REDACTED] = True
        return name, message, kept


class _Redaction:
    """The rules applied to one span."""

    def __init__(self, rules: Redactor) -> None:
        self._rules = rules
        self.matched = False
        self.matched_by_path = False

    def text(self, text: str) -> str:
        """Return a text with the expressions' matches replaced."""
        kept: list[str] = []
        at = 0
        for begin, end in self._spans(text):
            if end > at:
                if begin >= at:
                    kept += (text[at:begin], MARK)
                at = end
        self.matched |= at > 0
        rest = "".join((*kept, text[at:]))
        if "\\" in rest and any(self._spans(plain) for plain in _unescaped(rest)):
            self.matched = True
            return MARK
        return rest

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Return the begin and end of each match of the expressions that is not empty, in order."""
        spans = (match.span() for rule in self._rules.expressions for match in rule.finditer(text))
        return sorted((begin, end) for begin, end in spans if begin < end)

    def plain(self, value: object) -> Any:
        """Return an attribute's text, or list of texts, with the expressions' matches replaced."""
        if isinstance(value, list):
            return [self.plain(item) for item in cast("list[object]", value)]
        return self.text(value) if isinstance(value, str) else value

    def json(self, text: str) -> Any:
        """Return the redacted value of a JSON text; of any other text, the redacted text."""
        try:
            value = json.loads(text)
            for path in self._rules.paths:
                self._withhold(value, path)
            return self._top(value)
        except RecursionError:
            self.matched = True
            return _Text(MARK)
        except ValueError:
            if not self._rules.paths:
                return _Text(self.text(text))
            self.matched = True
            return _Text(MARK)

    def _top(self, value: Any) -> Any:
        """Redact a whole request or answer, but for numbers at its top and in its usage, which are no part of the conversation."""
        if not isinstance(value, dict):
            return self._value(value, True)
        fields = cast("dict[str, Any]", value).items()
        return {self.text(name): self._value(item, isinstance(item, list | dict) and name != "usage") for name, item in fields}

    def _value(self, value: Any, numbers: bool) -> Any:
        """Return a JSON value with the expressions' matches replaced; `numbers`: numbers as well."""
        match value:
            case str():
                return self.text(value)
            case dict():
                return {self.text(name): self._value(item, numbers) for name, item in cast("dict[str, Any]", value).items()}
            case list():
                return [self._value(item, numbers) for item in cast("list[Any]", value)]
            case bool() | None:
                return value
            case _:
                written = str(value)
                return value if not numbers or self.text(written) == written else MARK

    def _withhold(self, value: Any, path: _Path) -> None:
        step, *rest = path
        places: list[Any] = []
        if isinstance(value, dict):
            places = list(cast("dict[str, Any]", value)) if step == "*" else [step]
        elif isinstance(value, list):
            places = list(range(len(cast("list[Any]", value)))) if step == "*" else [step]
        for key in places:
            try:
                item = value[key]
            except (LookupError, TypeError):
                continue
            if rest:
                self._withhold(item, tuple(rest))
            elif item is not None and item not in ("", [], {}):
                value[key] = MARK
                self.matched = self.matched_by_path = True


class _Text(str):
    """A text that was no JSON, and is not encoded as JSON."""


def _encoded(value: Any) -> str:
    return value if isinstance(value, _Text) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _without_ids(value: Any) -> Any:
    """Return a JSON value without what may be token ids, or single tokens."""
    match value:
        case dict():
            return {
                name: MARK if name in _ARRAYS_THAT_SPELL and isinstance(item, list | dict) else _without_ids(item)
                for name, item in cast("dict[str, Any]", value).items()
            }
        case list():
            values = cast("list[Any]", value)
            return MARK if values and all(type(item) is int for item in values) else [_without_ids(item) for item in values]
        case _:
            return value


def _unescaped(text: str) -> Iterator[str]:
    """Yield a text with its JSON escapes decoded once, twice, and so on."""
    for _ in range(ESCAPE_LEVELS):
        plain = _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else _ESCAPED.get(match[2], match[2]), text)
        if plain == text:
            return
        # Beyond the basic plane a character is two escapes.
        text = plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        yield text


def _expression(rule: str) -> re.Pattern[str]:
    try:
        expression = re.compile(rule)
    except re.error as error:
        raise SettingsError(f"gateway.redact has {rule!r}, which is no regular expression: {error}. Fix it, or leave it out.") from None
    if expression.search(""):
        raise SettingsError(
            f"gateway.redact has {rule!r}, which finds the empty text, and so hits every call. Ask for one character at least."
        )
    return expression


def _path(rule: str) -> _Path:
    """Return the steps of a path such as `messages[*].content`: names, places in a list, `*` for each."""
    steps: list[str | int] = []
    at = 0
    while match := _STEP.match(rule, at):
        key = match[2]
        steps.append(match[1] if key is None else int(key) if key != "*" else "*")
        at = match.end()
    if at < len(rule) or not steps or rule.startswith("."):
        raise SettingsError(
            f"gateway.redact_paths has {rule!r}, which is no path. "
            "Write names and places, as in `messages[*].content` and `tools[0].function.description`."
        )
    return tuple(steps)
