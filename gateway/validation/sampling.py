"""The sampling parameters of a request."""

from dataclasses import dataclass
from typing import Final

from gateway.validation.violations import FieldViolations
from sluice.constraints import problem_of_json_schema, problem_of_regex
from sluice.v1.inference_pb2 import SamplingParams

MAX_TEMPERATURE: Final = 2.0
MAX_TOP_K: Final = 1 << 20
MIN_PENALTY: Final = 0.5
MAX_PENALTY: Final = 2.0
MAX_LOSS: Final = 2.0
"""Of presence and frequency penalty, either way."""
MAX_LOGPROBS: Final = 8
MAX_STOPS: Final = 8
MAX_STOP_CHARS: Final = 64


@dataclass(frozen=True)
class ValidSampling:
    """How tokens are drawn; defaults filled in, except those that depend on the model."""

    max_tokens: int | None
    """None: what the model's context has room for."""
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    """None: the gateway picks one."""
    repetition_penalty: float
    logprobs: int | None
    """Alternatives per token; None: no log-probabilities."""
    stops: tuple[str, ...]
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    json_schema: str | None
    regex: str | None

    @property
    def constraint(self) -> str | None:
        """Which constraint there is, by its field."""
        if self.json_schema is not None:
            return "json_schema"
        return None if self.regex is None else "regex"


def sampling_of(
    params: SamplingParams, max_answer_tokens: int, found: FieldViolations
) -> ValidSampling:
    """The parameters with their defaults; what is wrong with them goes into ``found``."""
    sampling = ValidSampling(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        temperature=params.temperature,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        top_k=params.top_k,
        seed=params.seed if params.HasField("seed") else None,
        repetition_penalty=(
            params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
        ),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        stops=tuple(params.stop),
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        min_tokens=params.min_tokens,
        json_schema=params.json_schema if params.HasField("json_schema") else None,
        regex=params.regex if params.HasField("regex") else None,
    )
    _check_numbers(sampling, max_answer_tokens, found)
    _check_losses(sampling, found)
    _check_min_tokens(sampling, max_answer_tokens, found)
    _check_stops(sampling.stops, found)
    _check_constraint(sampling, found)
    return sampling


def _check_numbers(s: ValidSampling, max_answer_tokens: int, found: FieldViolations) -> None:
    found.check(
        s.max_tokens is None or 1 <= s.max_tokens <= max_answer_tokens,
        "sampling.max_tokens",
        f"must be between 1 and {max_answer_tokens}",
    )
    # Comparisons with NaN are false, so NaN fails each of these.
    found.check(0 <= s.temperature <= MAX_TEMPERATURE, "sampling.temperature", "must be in [0, 2]")
    found.check(0 < s.top_p <= 1, "sampling.top_p", "must be above 0 and at most 1")
    found.check(0 <= s.min_p <= 1, "sampling.min_p", "must be in [0, 1]")
    found.check(s.top_k <= MAX_TOP_K, "sampling.top_k", f"must be at most {MAX_TOP_K}; 0 is none")
    found.check(
        MIN_PENALTY <= s.repetition_penalty <= MAX_PENALTY,
        "sampling.repetition_penalty",
        "must be in [0.5, 2]",
    )
    found.check(
        s.logprobs is None or s.logprobs <= MAX_LOGPROBS,
        "sampling.logprobs",
        f"must be at most {MAX_LOGPROBS}",
    )


def _check_losses(s: ValidSampling, found: FieldViolations) -> None:
    found.check(
        abs(s.presence_penalty) <= MAX_LOSS, "sampling.presence_penalty", "must be in [-2, 2]"
    )
    found.check(
        abs(s.frequency_penalty) <= MAX_LOSS, "sampling.frequency_penalty", "must be in [-2, 2]"
    )


def _check_min_tokens(s: ValidSampling, max_answer_tokens: int, found: FieldViolations) -> None:
    limit = s.max_tokens or max_answer_tokens
    found.check(
        s.min_tokens <= limit, "sampling.min_tokens", f"must be at most max_tokens, {limit}"
    )
    # A complete answer that must not end yet could not go on either.
    found.check(
        not (s.min_tokens and s.constraint),
        "sampling.min_tokens",
        f"cannot go with {s.constraint}, which alone says when the answer is complete",
    )


def _check_stops(stops: tuple[str, ...], found: FieldViolations) -> None:
    found.check(len(stops) <= MAX_STOPS, "sampling.stop", f"has more than {MAX_STOPS} strings")
    for index, stop in enumerate(stops):
        found.check(
            1 <= len(stop) <= MAX_STOP_CHARS,
            f"sampling.stop[{index}]",
            f"must have 1 to {MAX_STOP_CHARS} characters",
        )


def _check_constraint(s: ValidSampling, found: FieldViolations) -> None:
    reason = None
    if s.json_schema is not None:
        reason = problem_of_json_schema(s.json_schema)
    elif s.regex is not None:
        reason = problem_of_regex(s.regex)
    if reason is not None:
        found.add(f"sampling.{s.constraint}", reason)
