"""Several answers at once, with asyncio: python examples/stream_async.py."""

import asyncio

from sluice.client import AsyncClient, Delta

PROMPTS = (
    "Sort ascending: 31, 7, 19",
    "What is the total of 12, 30?",
    "Which label fits this ticket? My lamp arrived broken.",
)


async def answer(client: AsyncClient, prompt: str) -> str:
    """Return the text of one answer, put together from its pieces."""
    text = ""
    async with client.generate(prompt, max_tokens=64, timeout_s=30) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                text += event.text
    return text


async def main() -> None:
    """Asks everything at once, and prints the answers in the order of the prompts."""
    async with AsyncClient() as client:
        answers = await asyncio.gather(*(answer(client, prompt) for prompt in PROMPTS))
    for prompt, text in zip(PROMPTS, answers, strict=True):
        print(f"{prompt}\n  {text.replace(chr(10), chr(10) + '  ')}")


if __name__ == "__main__":
    asyncio.run(main())
