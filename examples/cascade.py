"""Which model answered, and what both used: python examples/cascade.py, with a mesh of examples/cascade.yaml."""

from sluice.client import Client

PROMPTS = (
    "Sort ascending: 7, 3, 12",
    "What is the total of 314, 272, 973, 323, 486?",
)


def main() -> None:
    """Asks one after the other."""
    with Client() as client:
        for prompt in PROMPTS:
            answer = client.generate(prompt, max_tokens=96, timeout_s=30).answer()
            used = ", ".join(
                f"{attempt.model} {attempt.usage.completion_tokens}" for attempt in answer.attempts
            )
            print(f"{answer.model}: {answer.text!r} (tokens: {used})")


if __name__ == "__main__":
    main()
