"""Fits the time of an engine's step as a linear function of its work, for the simulator."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from bench.support.harness import machine
from bench.support.sides import Side

DECODE_ROWS: Final = (1, 2, 4, 8, 16, 32)
DECODE_CONTEXTS: Final = (64, 256, 1024)
PREFILL_TOKENS: Final = (16, 64, 128, 256, 512)
PREFILL_CONTEXTS: Final = (0, 512, 1024)
STEPS: Final = 16


def costs(engine: Side, runs: int) -> list[dict[str, Any]]:
    """The JSON objects of both phases, with the points that they were fitted to."""
    decode = [
        (rows, *reversed(engine.call("decode_ms", rows, context, STEPS)))
        for rows in DECODE_ROWS
        for context in DECODE_CONTEXTS
    ]
    prefill = [
        (tokens, context, _median(engine, tokens, context, runs))
        for tokens in PREFILL_TOKENS
        for context in PREFILL_CONTEXTS
    ]
    decode_names = ("fixed_ms", "row_ms", "context_token_ms")
    prefill_names = ("fixed_ms", "token_ms", "token_and_context_token_ms")
    return [
        _line("decode", decode_names, [(1, rows, tokens, ms) for rows, tokens, ms in decode]),
        # A token looks at all before it, so attention costs as the product.
        _line(
            "prefill",
            prefill_names,
            [(1, new, new * (context + new / 2), ms) for new, context, ms in prefill],
        ),
    ]


def _median(engine: Side, tokens: int, context: int, runs: int) -> float:
    return float(np.median([engine.call("prefill_ms", tokens, context) for _ in range(runs)]))


def _line(phase: str, names: Sequence[str], points: Sequence[tuple[float, ...]]) -> dict[str, Any]:
    """Least squares of the relative error: a step of 2 ms counts as much as one of 50."""
    table = np.array(points)
    inputs, took_ms = table[:, :-1], table[:, -1]
    found, *_ = np.linalg.lstsq(inputs / took_ms[:, None], np.ones(len(table)), rcond=None)
    errors = np.abs(inputs @ found / took_ms - 1)
    return {
        "figure": "engine_cost",
        "phase": phase,
        **{name: float(value) for name, value in zip(names, found, strict=True)},
        "mean_error_share": float(errors.mean()),
        "points": [[float(value) for value in point[1:]] for point in points],
        "machine": machine(),
    }
