"""The families of guard models: the prompt of each and the parser of its answers.

Generative guards come with a chat template that makes their whole prompt (task, categories, form of the answer) of a
conversation, so a family is the turns and variables that its template takes. Sources, all model cards on Hugging Face:

- Llama Guard 3 and 4: "safe", or "unsafe" and a second line of categories, "S1,S9"; the score is the probability of the
  first word.
- ShieldGemma: "Yes" or "No" first; variable ``guideline``; the score is P(Yes) against P(No).
- Granite Guardian 3.0 and 3.1: "Yes" or "No"; 3.2: a second line ``<confidence> High </confidence>``; 3.3:
  ``<score> yes </score>``, perhaps behind ``<think>...</think>``. Variable ``guardian_config``; the score as above.
- Prompt Guard 1 and 2: a sequence classifier, the score is the softmax over its labels.
"""

import enum
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from typing_extensions import override

from gateway.safety.patterns import compiled
from gateway.safety.settings import GuardSettings


class Failure(enum.StrEnum):
    """Why there is no verdict; the names stand behind "guard.NAME." in records."""

    TIMEOUT = "timeout"
    """It did not come within the time budget."""
    UNAVAILABLE = "unavailable"
    """No worker serves the guard's model."""
    OVERLOADED = "overloaded"
    TOO_LONG = "too_long"
    """The text does not fit the guard's context."""
    UNPARSABLE = "unparsable"
    """What the guard said is no verdict."""
    FAILED = "failed"
    """Anything else."""


@dataclass(frozen=True)
class GuardVerdict:
    """The verdict of a guard.

    Attributes:
        flagged: whether it objects.
        categories: to what; at least one when it objects.
        score: how sure it is that there is something to object to, 0 to 1; None: it does not say.
    """

    flagged: bool
    categories: tuple[str, ...] = ()
    score: float | None = None


Outcome = GuardVerdict | Failure


class Unparsable(ValueError):
    """A guard's answer is no verdict."""


@dataclass(frozen=True)
class Option:
    """A token that could have stood at a place.

    Attributes:
        text: of this token alone.
        logprob: natural logarithm of its probability.
    """

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class Said:
    """The answer of a guard's row.

    Attributes:
        options: the most probable tokens of each place; empty lists where they were not told.
    """

    text: str
    options: Sequence[Sequence[Option]] = ()


class VerdictReader(Protocol):
    """Reads the answers of one family of guards."""

    def read(self, said: Said) -> GuardVerdict:
        """The verdict.

        Raises:
            Unparsable: there is none.
        """


def chance_of(said: Said, yes: str, no: str) -> float | None:
    """How probable ``yes`` is against ``no`` at the first place that says a word; None: that is not told.

    Both are in lower case. A token counts for the word that it begins, or that begins it.
    """
    for place in said.options:
        if not place or not place[0].text.strip():
            continue  # line breaks come first in some families
        for_yes = sum(math.exp(one.logprob) for one in place if _begins(one.text, yes))
        for_no = sum(math.exp(one.logprob) for one in place if _begins(one.text, no))
        both = for_yes + for_no
        return for_yes / both if both > 0 else None
    return None


def _begins(text: str, word: str) -> bool:
    text = text.strip().lower()
    return bool(text) and (word.startswith(text) or text.startswith(word))


Message = Mapping[str, str]
"""Role and content of one turn."""

OBJECTION: Final = "violation"
"""The category of guards that name none."""
PRINCIPLES: Final = """\
* "No Dangerous Content": The prompt or answer shall not contain or seek content that harms oneself or others, such as \
making weapons, promoting terrorism or instructions for suicide.
* "No Harassment": It shall not be malicious, intimidating, bullying or abusive towards a person.
* "No Hate Speech": It shall not target identity or protected attributes, or dehumanize people because of them.
* "No Sexually Explicit Information": It shall not contain references to sexual acts or other lewd content; medical \
and educational terms are permitted."""
"""What ShieldGemma asks about unless the policy has a guideline of its own: its four harm types."""

_CATEGORY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.-]{0,63}")
_SCORE: Final = re.compile(r"<score>\s*(yes|no)\s*</score>", re.IGNORECASE)
_THOUGHT: Final = re.compile(r"^\s*<think>.*?</think>", re.DOTALL)
_WORD: Final = re.compile(r"\W*([A-Za-z]+)")


@dataclass(frozen=True)
class Family:
    """How guards of one kind are asked.

    Attributes:
        reader: reads their answers.
        answer_tokens: longest answer.
        variables: of the chat template.
        whole: they judge the whole conversation; else the last turn of the caller and the answer.
        prompt: one turn made of {prompt} and {answer} instead of the conversation.
        classifies: asked with the text itself, without a chat template.
    """

    reader: VerdictReader
    answer_tokens: int
    variables: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False
    prompt: str | None = None
    classifies: bool = False

    def messages(self, asked: Sequence[Message], answer: str) -> list[dict[str, str]]:
        """The turns for the chat template.

        Args:
            asked: of caller and model, the caller's last.
            answer: what is judged; empty: the last turn of the caller is.
        """
        turns = [dict(turn) for turn in (asked if self.whole else asked[-1:])]
        if self.prompt is not None:
            text = _filled(self.prompt, turns[-1]["content"], answer)
            return [{"role": "user", "content": text}]
        return [*turns, {"role": "assistant", "content": answer}] if answer else turns


def family_of(settings: GuardSettings, labels: Sequence[str] = ()) -> Family:
    """The family that a policy names; ``labels`` are those of its model, if it classifies."""
    threshold = settings.threshold
    match settings.template:
        case "llama_guard":
            return Family(LlamaGuardReader(threshold), 64, whole=True)
        case "shieldgemma":
            variables = {"guideline": settings.guideline or PRINCIPLES}
            return Family(YesNoReader(OBJECTION, threshold), 8, variables)
        case "granite_guardian":
            risk = settings.risk or "harm"
            config = {"risk_name": risk, "criteria_id": risk}
            return Family(YesNoReader(risk, threshold), 32, {"guardian_config": config})
        case "classifier":
            return Family(
                ClassifierReader(labels, settings.categories, threshold), 1, classifies=True
            )
        case "token_classifier":
            raise AssertionError("it gives no verdicts")
        case "custom":
            assert settings.unsafe is not None
            assert settings.safe is not None
            reader = PatternReader(settings.unsafe, settings.safe)
            return Family(reader, settings.answer_tokens or 32, prompt=settings.prompt)


@dataclass(frozen=True)
class LlamaGuardReader(VerdictReader):
    """`VerdictReader` of Llama Guard."""

    threshold: float | None = None

    @override
    def read(self, said: Said) -> GuardVerdict:
        lines = [line.strip() for line in said.text.strip().splitlines() if line.strip()]
        word = lines[0].lower() if lines else ""
        if word not in ("safe", "unsafe"):
            raise Unparsable("neither safe nor unsafe")
        score = chance_of(said, "unsafe", "safe")
        flagged = _flagged(word == "unsafe", score, self.threshold)
        named = [name.strip() for name in ",".join(lines[1:]).split(",")]
        if any(name and _CATEGORY.fullmatch(name) is None for name in named):
            raise Unparsable("the second line is no list of categories")
        categories = tuple(name for name in named if name)
        return GuardVerdict(flagged, (categories or (OBJECTION,)) if flagged else (), score)


@dataclass(frozen=True)
class YesNoReader(VerdictReader):
    """`VerdictReader` of guards that answer a question: ShieldGemma, Granite Guardian."""

    category: str
    threshold: float | None = None

    @override
    def read(self, said: Said) -> GuardVerdict:
        text = _THOUGHT.sub("", said.text)
        found = _SCORE.search(text) or _WORD.match(text)
        word = found.group(1).lower() if found else ""
        if word not in ("yes", "no"):
            raise Unparsable("neither yes nor no")
        # Behind a tag or a thought the word is not at the first place.
        plain = text is said.text and not text.lstrip().startswith("<")
        score = chance_of(said, "yes", "no") if plain else None
        flagged = _flagged(word == "yes", score, self.threshold)
        return GuardVerdict(flagged, (self.category,) if flagged else (), score)


@dataclass(frozen=True)
class ClassifierReader(VerdictReader):
    """`VerdictReader` of sequence classifiers: a row's one token is the index of a label, its options all labels."""

    labels: Sequence[str]
    bad: Sequence[str]
    threshold: float | None = None

    @override
    def read(self, said: Said) -> GuardVerdict:
        options = said.options[0] if said.options else ()
        known = [one for one in options if one.token_id < len(self.labels)]
        if not known:
            raise Unparsable("no label came")
        chances = {self.labels[one.token_id]: math.exp(one.logprob) for one in known}
        told = sorted((name for name in self.bad if name in chances), key=lambda n: -chances[n])
        score = min(1.0, sum(chances[name] for name in told))
        likeliest = max(chances, key=lambda name: chances[name])
        flagged = _flagged(likeliest in self.bad, score, self.threshold)
        return GuardVerdict(flagged, tuple(told[:1]) if flagged else (), score)


class PatternReader(VerdictReader):
    """`VerdictReader` of a custom prompt: one pattern for objections, one for the rest."""

    def __init__(self, unsafe: str, safe: str) -> None:
        self._unsafe = compiled(unsafe, any_case=True, captures=True)
        self._safe = compiled(safe, any_case=True)

    @override
    def read(self, said: Said) -> GuardVerdict:
        found = self._unsafe.search(said.text)
        if found is None:
            if self._safe.search(said.text) is None:
                raise Unparsable("matches neither pattern")
            return GuardVerdict(flagged=False)
        category = (found.groupdict().get("category") or "").strip()
        return GuardVerdict(True, (category if _CATEGORY.fullmatch(category) else OBJECTION,))


def _flagged(by_word: bool, score: float | None, threshold: float | None) -> bool:
    return by_word if threshold is None or score is None else score >= threshold


def _filled(form: str, prompt: str, answer: str) -> str:
    """Fills all fields in one pass: braces inside the inserted texts are not fields."""
    values = {"{prompt}": prompt, "{answer}": answer}
    return re.sub(r"\{prompt\}|\{answer\}", lambda place: values[place.group()], form)
