"""An agent on OpenAI's Agents SDK, as a user writes it: `whole`, `stream`, `cut` (leaves in the middle), each on a city.

It asks by the Responses API, the SDK's default, unless AGENTS_API names the other one.
"""

from __future__ import annotations

import asyncio
import os
import sys

from agents import Agent, ModelSettings, Runner, set_default_openai_api
from openai.types.responses import ResponseTextDeltaEvent

if api := os.environ.get("AGENTS_API"):
    set_default_openai_api(api)
AGENT = Agent(name="guide", model="policy", model_settings=ModelSettings(temperature=0, max_tokens=8))
TALKER = AGENT.clone(model_settings=ModelSettings(temperature=0, max_tokens=100, extra_body={"ignore_eos": True}))


async def whole(city: str) -> str:
    return (await Runner.run(AGENT, f"say {city}")).final_output


async def stream(city: str) -> str:
    running = Runner.run_streamed(AGENT, f"say {city}")
    return "".join([event.data.delta async for event in running.stream_events() if is_text(event)])


async def cut(city: str) -> str:
    running = Runner.run_streamed(TALKER, f"say {city}")
    text = ""
    async for event in running.stream_events():
        if is_text(event):
            text += event.data.delta
            running.cancel()
    return text


def is_text(event: object) -> bool:
    return isinstance(getattr(event, "data", None), ResponseTextDeltaEvent)


async def main() -> None:
    for way, place in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        print(await {"whole": whole, "stream": stream, "cut": cut}[way](place))


if __name__ == "__main__":
    asyncio.run(main())
