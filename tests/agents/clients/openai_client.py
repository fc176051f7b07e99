"""An agent on the bare openai client, as a user writes it: `whole`, `stream`, `cut` (leaves in the middle), each on a city."""

from __future__ import annotations

import sys

from openai import OpenAI

CLIENT = OpenAI()


def whole(city: str) -> str:
    answer = CLIENT.chat.completions.create(model="policy", messages=messages(city), temperature=0, max_tokens=8)
    return answer.choices[0].message.content or ""


def stream(city: str) -> str:
    chunks = CLIENT.chat.completions.create(model="policy", messages=messages(city), temperature=0, max_tokens=8, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def cut(city: str) -> str:
    with CLIENT.chat.completions.create(
        model="policy", messages=messages(city), temperature=0, max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    ) as chunks:
        return "".join(chunk.choices[0].delta.content or "" for _, chunk in zip(range(4), chunks, strict=False))


def messages(city: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"say {city}"}]


if __name__ == "__main__":
    for way, place in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        print({"whole": whole, "stream": stream, "cut": cut}[way](place))
