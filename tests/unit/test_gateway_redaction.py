"""Redaction: what the rules name is nowhere in a span, not as text, not in token ids, however it was written."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.proxy.redaction import MARK, Redactor
from spangrad.errors import SettingsError
from spangrad.settings import GatewaySettings
from tests.support.fake_engine import FakeEngine, Recorded, float32s, uint32s
from tests.support.gateways import staged
from tests.support.otlp import SunkSpan

GOLDEN = Path(__file__).parent.parent / "fixtures/gateway"
ARRAYS = ("spangrad.input.token_ids", "spangrad.output.token_ids", "spangrad.output.logprobs")


def redacted(request: str, response: str | None = None, /, *rules: str, paths: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """Return the attributes of a call that remain after redaction: its request, its answer and its ids."""
    rules_of = Redactor(GatewaySettings(redact=rules, redact_paths=paths))
    attributes = {"spangrad.request.json": request, "spangrad.response.json": response, "spangrad.input.token_ids": b"ids!", **more}
    _, _, kept = rules_of.redact("chat", "", attributes)
    return {key: value for key, value in kept.items() if value is not None}


@pytest.mark.parametrize(
    ("text", "rule", "kept"),
    [
        ('{"messages":[{"content":"call ada@x.org now"}]}', r"\w+@\w+\.org", '{"messages":[{"content":"call [redacted] now"}]}'),
        ('{"a":"caf\\u00e9"}', "café", '{"a":"[redacted]"}'),
        ('{"a":"https:\\/\\/ho.st\\/key"}', "https://ho.st/key", '{"a":"[redacted]"}'),
        ('{"a":"\\ud83d\\ude00!"}', "😀", '{"a":"[redacted]!"}'),
        ('{"a":"{\\"card\\": \\"4111\\"}"}', "4111", '{"a":"{\\"card\\": \\"[redacted]\\"}"}'),
        ('{"a":"say {\\"name\\": \\"caf\\\\u00e9\\"}"}', "café", '{"a":"[redacted]"}'),
        ('{"a":"{\\"b\\": \\"{\\\\\\"c\\\\\\": \\\\\\"caf\\\\\\\\u00e9\\\\\\"}\\"}"}', "café", '{"a":"[redacted]"}'),
        ('{"a":{"b":[4111111111111111, true, null, 7]}}', r"\d{16}", '{"a":{"b":["[redacted]",true,null,7]}}'),
        ('{"a":{"secret":1}}', "secret", '{"a":{"[redacted]":1}}'),
        ('{"a":"secret","a":"else"}', "else", '{"a":"[redacted]"}'),
        ("no JSON, but a secret", "secret", "no JSON, but a [redacted]"),
        ('{"a":"abcdef"} and "\\u0073ecret"', "secret", "[redacted]"),
        ('{"a":"a\\ud800secret"}', "secret", '{"a":"a\ud800[redacted]"}'),
        ("[" * 100_000, "secret", "[redacted]"),
    ],
    ids=[
        "plain",
        "escaped letter",
        "escaped slash",
        "two escapes for one character",
        "JSON in a string",
        "escaped letter of JSON in a string",
        "escaped letter of JSON in JSON in a string",
        "number",
        "name",
        "named twice",
        "no JSON",
        "escaped letter of no JSON",
        "half a character",
        "too deep",
    ],
)
def test_redactor_expression_is_replaced_in_any_json_spelling(text: str, rule: str, kept: str) -> None:
    assert redacted(text, None, rule) == {"spangrad.request.json": kept, "spangrad.redacted": True}
    assert redacted('{"prompt":1}', text, rule) == {
        "spangrad.request.json": '{"prompt":1}',
        "spangrad.response.json": kept,
        "spangrad.redacted": True,
    }


def test_redactor_overlapping_expressions_replace_all_matches() -> None:
    kept = redacted('{"a":"key-1234-end, 99999"}', None, r"\d{4}", "key-1234", "1234-end")
    assert kept["spangrad.request.json"] == '{"a":"[redacted], [redacted]9"}'


def test_redactor_call_without_match_keeps_ids_and_ignores_engine_numbers() -> None:
    answer = '{"id":"chatcmpl-x","created":1700000000,"choices":[{"index":0}],"usage":{"prompt_tokens":1000000}}'
    assert redacted('{"seed":1234567,"messages":[]}', answer, r"\d{7}") == {
        "spangrad.request.json": '{"seed":1234567,"messages":[]}',
        "spangrad.response.json": answer,
        "spangrad.input.token_ids": b"ids!",
    }


@pytest.mark.parametrize(
    ("path", "messages", "kept"),
    [
        ("[*].content", '[{"content":"a"},{"content":null}]', '[{"content":"[redacted]"},{"content":null}]'),
        ("[*].content", '[{"content":[{"text":"b"}]}]', '[{"content":"[redacted]"}]'),
        ("[1].content", '[{"content":"a"},{"content":"b"}]', '[{"content":"a"},{"content":"[redacted]"}]'),
        ("", '[{"content":"a"}]', '"[redacted]"'),
        ("[*].calls[0].function.name", '[{"calls":[{"function":{"name":"f"}}]}]', '[{"calls":[{"function":{"name":"[redacted]"}}]}]'),
        ("[*][*]", '[{"role":"user","content":"b"}]', '[{"role":"[redacted]","content":"[redacted]"}]'),
    ],
)
def test_redactor_path_is_replaced(path: str, messages: str, kept: str) -> None:
    attributes = redacted(f'{{"messages":{messages}}}', None, paths=(f"messages{path}",))
    assert attributes == {"spangrad.request.json": f'{{"messages":{kept}}}', "spangrad.redacted": True}


@pytest.mark.parametrize("text", ['{"messages":[]}', '{"messages":"x"}', '{"messages":[7,"x",{"content":""}]}', "7"])
def test_redactor_path_without_match_changes_nothing(text: str) -> None:
    assert redacted(text, None, paths=("messages[*].content", "tools[3].name")) == {
        "spangrad.request.json": text,
        "spangrad.input.token_ids": b"ids!",
    }


def test_redactor_with_paths_withholds_invalid_json_and_errors() -> None:
    rules = Redactor(GatewaySettings(redact_paths=("messages",)))
    request, answer = "spangrad.request.json", "spangrad.response.json"
    kept = rules.redact("chat", "x", {request: '{"messages":"secret"}', answer: "sec", "error.type": "400"})
    attributes = {request: '{"messages":"[redacted]"}', answer: MARK, "error.type": "400", "spangrad.redacted": True}
    assert kept == ("chat", MARK, attributes)


def test_redactor_redacted_call_keeps_no_ids_in_json() -> None:
    kept = redacted(
        '{"prompt":[[1,2],[3]],"stop":["secret"],"logprobs":true}',
        '{"choices":[{"logprobs":{"tokens":["se","cret"]},"token_ids":[1],"index":0}]}',
        "secret",
    )
    assert kept == {
        "spangrad.request.json": '{"prompt":["[redacted]","[redacted]"],"stop":["[redacted]"],"logprobs":true}',
        "spangrad.response.json": '{"choices":[{"logprobs":"[redacted]","token_ids":"[redacted]","index":0}]}',
        "spangrad.redacted": True,
    }


@given(
    secret=st.text(st.characters(min_codepoint=33, exclude_categories=("Cs", "Nd")), min_size=4, max_size=12),
    around=st.text(max_size=5),
    levels=st.integers(0, 3),
    ascii_only=st.booleans(),
)
def test_redactor_secret_in_nested_json_is_replaced(secret: str, around: str, levels: int, ascii_only: bool) -> None:
    text = around + secret + around
    for _ in range(levels):
        text = json.dumps({"inner": text}, ensure_ascii=ascii_only)
    kept = redacted(json.dumps({"a": text}, ensure_ascii=ascii_only), None, re.escape(secret))
    assert kept["spangrad.redacted"]
    value = json.loads(kept["spangrad.request.json"])["a"]
    while isinstance(value, str) and value.startswith('{"inner"'):
        try:
            value = json.loads(value)["inner"]
        except ValueError:
            break  # the secret began with the character after a backslash
    assert secret not in value


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"redact": ("a", "(b")},
            "gateway.redact has '(b', which is no regular expression: missing ), unterminated subpattern at position 0.",
        ),
        ({"redact": ("b*",)}, "gateway.redact has 'b*', which finds the empty text, and so hits every call."),
        ({"redact_paths": ("messages[*",)}, "gateway.redact_paths has 'messages[*', which is no path."),
        ({"redact_paths": ("",)}, "gateway.redact_paths has '', which is no path."),
        ({"redact_paths": ("a..b",)}, "gateway.redact_paths has 'a..b', which is no path."),
        ({"redact_paths": ("a[x]",)}, "gateway.redact_paths has 'a[x]', which is no path."),
    ],
)
def test_redactor_invalid_rule_raises_and_names_it(rules: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Redactor(GatewaySettings.model_validate(rules))
    assert str(caught.value).startswith(message)


class Written:
    """Everything that the gateway writes to its spill."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes = b""
        writev = os.writev

        def write(file: int, parts: tuple[bytes, bytes]) -> int:
            self.bytes += b"".join(parts)
            return writev(file, parts)

        patch.setattr(os, "writev", write)


def spelled(span: SunkSpan, tokenizer: Tokenizer) -> list[str]:
    """Every text of a span, and every byte array of it as the text that its token ids spell."""
    texts = [span.name, span.status]
    for value in span.attributes.values():
        texts += [tokenizer.decode(uint32s(value), skip_special_tokens=False)] if isinstance(value, bytes) else [str(value)]
    return texts


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


# The first stands in the prompt, the others in the answer; a stream brings `weather` and ` rome` in two parts.
@pytest.mark.parametrize("secret", ["say rome", "weather rome"])
@pytest.mark.parametrize(
    "asked", [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True, "logprobs": True, "return_token_ids": True}], ids=str
)
async def test_redact_setting_leaves_secret_nowhere_in_span(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, secret: str, asked: dict[str, Any]
) -> None:
    written = Written(monkeypatch)
    async with staged(redact=[secret]) as stage:
        status, _ = await stage.chat(**asked)
        (span,) = await stage.spans()
        assert status == 200
    assert [text for text in spelled(span, tokenizer) if secret in text] == []
    assert secret.encode() not in written.bytes
    assert [key for key in ARRAYS if key in span.attributes] == []
    assert span.attributes["spangrad.redacted"] is True
    assert MARK in str(span.attributes["spangrad.request.json"]) + str(span.attributes["spangrad.response.json"])
    # The test would see it.
    async with staged() as stage:
        await stage.chat(**{key: value for key, value in asked.items() if key != "n"})
        (span,) = await stage.spans()
    assert len([text for text in spelled(span, tokenizer) if secret in text]) == 2
    assert "spangrad.redacted" not in span.attributes


async def test_redact_setting_leaves_client_answer_unchanged() -> None:
    async with staged() as open_stage, staged(redact=["rome"]) as stage:
        assert await stage.chat() == await open_stage.chat()
        assert await stage.chat(stream=True) == await open_stage.chat(stream=True)


async def test_redact_keep_ids_keeps_ids_of_redacted_call() -> None:
    async with staged(redact=["rome"], redact_keep_ids=True) as stage:
        await stage.chat()
        (span,) = await stage.spans()
    assert (span.attributes["spangrad.redacted"], json.loads(str(span.attributes["spangrad.request.json"]))["messages"]) == (
        True,
        [{"role": "user", "content": "say [redacted]"}],
    )
    prompt, response, logprobs = (cast("bytes", span.attributes[key]) for key in ARRAYS)
    assert (uint32s(prompt), uint32s(response), float32s(logprobs)) == ([1, 4, 7, 12, 2, 1, 5], [9, 12, 2], [-0.25, -0.5, -0.125])


async def test_redact_setting_covers_names_errors_and_models() -> None:
    error = {"message": "x" * 1990 + " sk-1234", "type": "BadRequestError", "param": None, "code": 400}
    engine = FakeEngine(answers={"/v1/completions": Recorded(json.dumps({"error": error}).encode(), status=400)})
    async with staged(engine, redact=["sk-1234", "gpt-secret"]) as stage:
        async with stage.client.post("/v1/completions", json={"model": "gpt-secret", "prompt": "x"}) as answer:
            assert (answer.status, await answer.json()) == (400, {"error": error})
        (span,) = await stage.spans()
    assert span.name == "text_completion [redacted]"
    assert span.attributes["gen_ai.request.model"] == MARK
    # The status is cut where half of the secret would have been left.
    assert [text for text in (span.name, span.status, *map(str, span.attributes.values())) if "sk-1" in text or "gpt" in text] == []


@pytest.mark.parametrize(
    "name", ["chat-tool", "completions-echo", "messages-tool", "responses-tool", "responses-logprobs", "responses-messages"]
)
@pytest.mark.parametrize("form", ["", "-stream"])
async def test_redact_setting_keeps_no_ids_or_single_tokens_in_any_dialect(monkeypatch: pytest.MonkeyPatch, name: str, form: str) -> None:
    """Answers as a real vLLM gave them."""
    given = json.loads((GOLDEN / f"{name}{form}.json").read_text())
    engine = FakeEngine(answers={given["path"]: Recorded(given["plugged"]["body"].encode(), given["plugged"]["type"])})
    async with staged(engine, redact=["policy"]) as stage:
        async with stage.client.post(given["path"], json=given["request"]) as answer:
            await answer.read()
        (span,) = await stage.spans()
    assert [key for key in ARRAYS if key in span.attributes] == []
    for key in ("spangrad.request.json", "spangrad.response.json"):
        assert _arrays(json.loads(str(span.attributes[key]))) == []


def _arrays(value: Any) -> list[Any]:
    """Lists of numbers, or of tokens, in a JSON value."""
    if isinstance(value, dict):
        own = [inner for name, inner in value.items() if name in {"logprobs", "tokens", "token_ids"} and isinstance(inner, list | dict)]
        return own + [array for inner in value.values() for array in _arrays(inner)]
    if isinstance(value, list):
        return [value] if value and all(type(inner) is int for inner in value) else [array for inner in value for array in _arrays(inner)]
    return []
