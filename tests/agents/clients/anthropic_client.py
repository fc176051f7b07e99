"""An agent on Anthropic's client, as a user writes it: `whole` and `stream`, each on a city."""

from __future__ import annotations

import sys

from anthropic import Anthropic

CLIENT = Anthropic()
GREEDY = {"temperature": 0}
"""The client has no name for it any more; the interface has."""


def whole(city: str) -> str:
    answer = CLIENT.messages.create(model="policy", messages=messages(city), max_tokens=8, extra_body=GREEDY)
    return "".join(block.text for block in answer.content if block.type == "text")


def stream(city: str) -> str:
    with CLIENT.messages.stream(model="policy", messages=messages(city), max_tokens=8, extra_body=GREEDY) as answer:
        return "".join(answer.text_stream)


def messages(city: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"say {city}"}]


if __name__ == "__main__":
    for way, place in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        print({"whole": whole, "stream": stream}[way](place))
