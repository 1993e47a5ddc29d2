"""The wrong fields of a request, collected so that one error names all of them; and its sampling parameters."""

from collections.abc import Mapping
from typing import Final

from sluice.errors import FieldViolation, InvalidRequest
from sluice.v1.inference_pb2 import SamplingParams

NAMED_MAX: Final = 16
"""An error travels in the trailers of a call, which have room for a few kilobytes."""
CONSTRAINTS: Final = {"json_schema": "a JSON schema", "regex": "a regular expression"}
"""What constraints are, by their fields."""
RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0, 2),
    "min_p": (0, 1),
    "repetition_penalty": (0.5, 2),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
MAX_TOP_K: Final = 1 << 20
MAX_LOGPROBS: Final = 8
MAX_STOPS: Final = 8
MAX_STOP_CHARS: Final = 64
MAX_STOP_TOKENS: Final = 32
MAX_BIASES: Final = 1024
MAX_BIAS: Final = 100
MAX_ANSWERS: Final = 16


class FieldViolations:
    """The wrong fields found so far; of many the first `NAMED_MAX` are named."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []
        self._unnamed = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, field: str, description: str) -> None:
        """``field`` is wrong; ``description`` says what would be valid, and quotes no text of a prompt."""
        if len(self._found) < NAMED_MAX:
            self._found.append(FieldViolation(field, description))
        else:
            self._unnamed += 1

    def check(self, holds: bool, field: str, description: str) -> None:
        """Adds ``field`` unless ``holds``."""
        if not holds:
            self.add(field, description)

    def raise_if_any(self) -> None:
        """Raises one `InvalidRequest` with all of them."""
        if self._found:
            message = "; ".join(f"{v.field}: {v.description}" for v in self._found)
            message += f"; and {self._unnamed} more" if self._unnamed else ""
            raise InvalidRequest(message, violations=self._found)


def sampling_of(
    params: SamplingParams, max_answer_tokens: int, found: FieldViolations
) -> SamplingParams:
    """A copy with all defaults but those that depend on the model; what is wrong goes into ``found``.

    Whether a constraint can be enforced is checked after admission, because it takes longer than all else.
    """
    sampling = SamplingParams(top_p=1.0, repetition_penalty=1.0)
    if _has_too_many(params, found):
        return sampling
    sampling.MergeFrom(params)
    _check_numbers(sampling, max_answer_tokens, found)
    _check_ends(sampling, max_answer_tokens, found)
    return sampling


def _has_too_many(s: SamplingParams, found: FieldViolations) -> bool:
    """Whether the request is refused for their number alone: a copy of a million costs more than the refusal."""
    stops, biases = len(s.stop) > MAX_STOPS, len(s.logit_bias) > MAX_BIASES
    stop_tokens = len(s.stop_token_ids) > MAX_STOP_TOKENS
    if stops:
        found.add("sampling.stop", f"has more than {MAX_STOPS} strings")
    if stop_tokens:
        found.add("sampling.stop_token_ids", f"has more than {MAX_STOP_TOKENS} tokens")
    if biases:
        found.add("sampling.logit_bias", f"has more than {MAX_BIASES} tokens")
    return stops or stop_tokens or biases


def _check_numbers(s: SamplingParams, max_answer_tokens: int, found: FieldViolations) -> None:
    found.check(
        not s.HasField("max_tokens") or 1 <= s.max_tokens <= max_answer_tokens,
        "sampling.max_tokens",
        f"must be between 1 and {max_answer_tokens}",
    )
    # Comparisons with NaN are false, so NaN fails these.
    for name, (low, high) in RANGES.items():
        if not low <= getattr(s, name) <= high:
            found.add(f"sampling.{name}", f"must be in [{low:g}, {high:g}]")
    found.check(0 < s.top_p <= 1, "sampling.top_p", "must be above 0 and at most 1")
    found.check(s.top_k <= MAX_TOP_K, "sampling.top_k", f"must be at most {MAX_TOP_K}; 0 is none")
    if not all(-MAX_BIAS <= bias <= MAX_BIAS for bias in s.logit_bias.values()):
        found.add("sampling.logit_bias", f"values must be in [-{MAX_BIAS}, {MAX_BIAS}]")
    within = not s.HasField("n") or 1 <= s.n <= MAX_ANSWERS
    found.check(within, "sampling.n", f"must be between 1 and {MAX_ANSWERS}")
    found.check(s.logprobs <= MAX_LOGPROBS, "sampling.logprobs", f"must be at most {MAX_LOGPROBS}")


def _check_ends(s: SamplingParams, max_answer_tokens: int, found: FieldViolations) -> None:
    """What says where an answer ends: a constraint does so alone."""
    limit, kind = s.max_tokens or max_answer_tokens, s.WhichOneof("constraint")
    found.check(
        s.min_tokens <= limit, "sampling.min_tokens", f"must be at most max_tokens, {limit}"
    )
    if kind is not None:
        beside = f"cannot be combined with {CONSTRAINTS.get(kind, '')}, which determines where the answer ends"
        # An answer that is complete by its constraint but must not end yet could not continue.
        found.check(not s.min_tokens, "sampling.min_tokens", beside)
        found.check(not s.stop_token_ids, "sampling.stop_token_ids", beside)
    for index, stop in enumerate(s.stop):
        found.check(
            1 <= len(stop) <= MAX_STOP_CHARS,
            f"sampling.stop[{index}]",
            f"must have 1 to {MAX_STOP_CHARS} characters",
        )
