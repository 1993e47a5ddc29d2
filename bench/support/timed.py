"""Answers with the seconds they took; and the fastest of several settings."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, int], list[list[int]]]

Made = TypeVar("Made")


def timed(generate: Generate, prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds, and the answers, of which each has all its tokens."""
    start = time.perf_counter()
    answers = generate(prompts, new_tokens)
    took_s = time.perf_counter() - start
    assert [len(answer) for answer in answers] == [new_tokens] * len(prompts)
    return took_s, answers


def fastest(
    settings: Iterable[dict[str, Any]],
    make: Callable[..., Made],
    trial: Callable[[Made], float],
) -> tuple[Made, str]:
    """What ``make`` makes of the settings whose second trial takes the fewest seconds, and all trials in words."""
    best: tuple[float, Made] | None = None
    told = []
    for setting in settings:
        made = make(**setting)
        trial(made)
        took_s = trial(made)
        told.append(f"{_words(setting)} {took_s:.3g} s")
        if best is None or took_s < best[0]:
            if best is not None:
                _close(best[1])
            best = (took_s, made)
        else:
            _close(made)
    assert best is not None
    return best[1], "tried " + ", ".join(told)


def _close(made: Any) -> None:
    """What is not the fastest gives its memory back."""
    if hasattr(made, "close"):
        made.close()


def _words(setting: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in setting.items()) or "defaults"
