"""An agent on LangGraph and langchain-openai, as a user writes it: `whole`, `stream`, `cut` (leaves in the middle), each on a city."""

from __future__ import annotations

import sys

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

MODEL = ChatOpenAI(model="policy", temperature=0, max_completion_tokens=8)


def asks(state: MessagesState) -> MessagesState:
    return {"messages": [MODEL.invoke(state["messages"])]}


def graph():
    builder = StateGraph(MessagesState)
    builder.add_node("asks", asks)
    builder.add_edge(START, "asks")
    builder.add_edge("asks", END)
    return builder.compile(name="guide")


def whole(city: str) -> str:
    return graph().invoke({"messages": [("user", f"say {city}")]})["messages"][-1].text


def stream(city: str) -> str:
    return "".join(chunk.text for chunk, _ in graph().stream({"messages": [("user", f"say {city}")]}, stream_mode="messages"))


def cut(city: str) -> str:
    long = MODEL.bind(max_completion_tokens=100, extra_body={"ignore_eos": True})
    chunks = long.stream([("user", f"say {city}")])
    text = "".join(chunk.text for _, chunk in zip(range(4), chunks, strict=False))
    chunks.close()
    return text


if __name__ == "__main__":
    for way, place in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        print({"whole": whole, "stream": stream, "cut": cut}[way](place))
