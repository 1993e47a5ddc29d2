"""One answer as a stream, without asyncio: python examples/stream.py [PROMPT]."""

import sys

from sluice.client import Client, Delta, Finished, Started
from sluice.errors import SluiceError


def main(prompt: str) -> None:
    """Print the answer as it comes."""
    with Client() as client, client.generate(prompt, max_tokens=64, timeout_s=30) as stream:
        for event in stream:
            match event:
                case Started(model=model):
                    print(f"{model}: ", end="")
                case Delta(text=text):
                    print(text, end="", flush=True)
                case Finished(usage=usage, timings=timings):
                    first = timings.time_to_first_token_ms
                    print(f"\n{usage.completion_tokens} tokens, the first after {first:.0f} ms")


if __name__ == "__main__":
    try:
        main(" ".join(sys.argv[1:]) or "Sort ascending: 31, 7, 19")
    except SluiceError as error:
        sys.exit(f"{error.reason}: {error}")
