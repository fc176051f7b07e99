"""Rows for supervised fine-tuning, as JSON lines: messages with weights, or token ids with a loss mask.

Text: `messages` with `weight` 1 on the replies that are trained and 0 on other assistant messages, as OpenAI's fine-tuning reads it, and
`tools`. A call without messages (/v1/completions) is `prompt` and `completion`. Tokens: `input_ids` and `loss_mask`, the engine's own ids.
Invariant: each call's reply is trained in exactly one line, after exactly the prompt that it answered.
"""

from __future__ import annotations

from pathlib import Path

from transition_builder.dialects.messages import Message
from transition_builder.export.call_texts import about, rollout_texts
from transition_builder.export.conversations import Conversation, of_tokens
from transition_builder.export.files import JsonLines
from transition_builder.export.reading import ExportReader
from transition_builder.export.tally import LeftOut


def write_sft(reader: ExportReader, out: Path) -> None:
    """Write conversations to the file `out`."""
    with JsonLines(out) as lines:
        for part in reader.parts():
            for rollout in rollout_texts(reader, part):
                for conversation, calls in rollout.conversations():
                    tools = {"tools": conversation.tools} if conversation.tools else {}
                    lines.write({"messages": weighted(conversation), **tools, "meta": about(reader, rollout.rollout, calls)})
                    reader.tally.write(len(calls), rows=1, trained_messages=sum(conversation.trained))
                for call_text in rollout.call_texts:
                    if isinstance(call_text.dialogue.prompt, str):
                        texts = {"prompt": call_text.dialogue.prompt, "completion": call_text.dialogue.reply}
                        lines.write({**texts, "meta": about(reader, rollout.rollout, [call_text.call])})
                        reader.tally.write(1, rows=1)


def write_sft_tokens(reader: ExportReader, out: Path) -> None:
    """Write token sequences to the file `out`."""
    with JsonLines(out) as lines:
        for part in reader.parts():
            for rollout, calls in part.by_rollout():
                kept = [call for call in calls if call["PromptIds"] and call["ResponseIds"]]
                reader.tally.count_left_out(LeftOut.NO_IDS, len(calls) - len(kept))
                for tokens in of_tokens([(call["PromptIds"], call["ResponseIds"]) for call in kept]):
                    merged = [kept[at] for at in tokens.calls]
                    lines.write({"input_ids": tokens.ids, "loss_mask": tokens.mask, "meta": about(reader, rollout, merged)})
                    reader.tally.write(len(merged), rows=1, tokens=len(tokens.ids), trained_tokens=sum(tokens.mask))


def weighted(conversation: Conversation) -> list[Message]:
    """Return the messages with `weight` on those of the assistant."""
    pairs = zip(conversation.messages, conversation.trained, strict=True)
    return [message | ({"weight": int(trained)} if message["role"] == "assistant" else {}) for message, trained in pairs]
