"""An agent of ten lines on the plain OpenAI client, and its reward; neither knows anything of being trained."""

from openai import AsyncOpenAI


async def answer(given: dict[str, str]) -> str:
    """Ask the model to say a city; the address and the key come from OPENAI_BASE_URL and OPENAI_API_KEY."""
    question = f"say {given['city']}"
    reply = await AsyncOpenAI().chat.completions.create(
        model="policy", messages=[{"role": "user", "content": question}], max_completion_tokens=3
    )
    return reply.choices[0].message.content or ""


def score(given: dict[str, str], output: str) -> float:
    """Return 1 for an answer that ends with the city, else 0."""
    return float(output.endswith(given["city"]))
