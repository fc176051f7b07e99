"""Prompts that continue a call by its tokens: a template that renders replies from their text, and calls of random conversations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.vllm_plugin.continuation import FIRST, Continued, Rendered

END, ASSISTANT, USER, NEWLINE, THINK, CLOSE, SILENT = 0, 1, 2, 3, 4, 5, 6
"""Tokens of a template, and one that leaves no text."""
ENDS = {END}
WORD = st.integers(10, 40)
REPLIES = st.lists(st.one_of(WORD, st.just(SILENT)), max_size=6)
USERS = st.lists(WORD, max_size=6)


def rendered(users: list[list[int]], replies: list[list[int]], *, thinks: bool) -> list[int]:
    """Messages as a template renders them: replies from their texts; with `thinks`, the last begins with an empty block."""
    prompt: list[int] = []
    for at, user in enumerate(users):
        prompt += [USER, NEWLINE, *user, END, NEWLINE, ASSISTANT, NEWLINE]
        if at < len(replies):
            prompt += [*(word // 2 * 2 for word in replies[at] if word >= 10), END, NEWLINE]  # another tokenization
        elif thinks:
            prompt += [THINK, CLOSE]
    return prompt


@given(st.lists(st.tuples(USERS, REPLIES, st.booleans()), min_size=1, max_size=6), USERS, st.booleans())
def test_each_prompt_begins_with_the_tokens_of_the_call_before(
    turns: list[tuple[list[int], list[int], bool]], last: list[int], thinks: bool
) -> None:
    before, read = FIRST, list[int]()
    users = [*(user for user, _, _ in turns), last]
    replies = [reply for _, reply, _ in turns]
    for at in range(len(users)):
        whole = rendered(users[: at + 1], replies[:at], thinks=thinks)
        prompt = before.prompt(whole, ENDS)
        new = [NEWLINE, USER, NEWLINE, *users[at], END, NEWLINE, ASSISTANT, NEWLINE, *([THINK, CLOSE] if thinks else [])]
        if at:
            ended = turns[at - 1][2]
            assert prompt == [*read, *([] if ended else [END]), *new]
        else:
            assert prompt == whole
        if at < len(turns):
            sampled = [*replies[at], *([END] if turns[at][2] else [])]
            read = [*prompt, *sampled]
            before = Continued.of_field(Continued(read, Rendered.of(whole, ENDS)).field())


@pytest.mark.parametrize(
    "other",
    [
        [[[7, 8], [9]], [[11]]],  # another first message
        [[[30]], []],  # no reply after it
    ],
)
def test_prompt_of_another_conversation_is_left_as_it_is_rendered(other: list[list[list[int]]]) -> None:
    first = rendered([[30]], [], thinks=False)
    call = Continued([*first, 12, END], Rendered.of(first, ENDS))
    whole = rendered(*other, thinks=False)
    assert call.prompt(whole, ENDS) is whole


def test_user_message_after_the_last_end_is_no_beginning_of_a_reply() -> None:
    """Templates without an end after a user's message: another message there is another conversation, however its turns before end."""
    earlier, long = [20, END], list(range(10, 10 + 40))
    call = Continued([*earlier, *long, 12, END], Rendered.of([*earlier, *long], ENDS))
    other = [*earlier, *reversed(long), 12, END, 30]
    assert call.prompt(other, ENDS) is other
    assert call.prompt([*earlier, *long, 12, END, 30], ENDS) == [*earlier, *long, 12, END, 30]


@pytest.mark.parametrize("field", [{"ids": "AAAA"}, {"ids": "A", "rendered": [1, "", 0, ""]}, {"ids": "AAAAAA==", "rendered": [1]}, "x"])
def test_malformed_field_is_an_error(field: object) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Continued.of_field(field)
