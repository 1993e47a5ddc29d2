"""The families of guard models: how each is prompted, and what its answers mean.

Generative guards come with a chat template that makes their whole prompt (task, categories, form of
the answer) from a conversation. So a family is the turns and variables that its template takes, and
two patterns: of answers that object and of answers that do not. The named families are presets of
what an operator writes for `custom`. Sources, all model cards on Hugging Face:

- Llama Guard 3 and 4: "safe", or "unsafe" and a second line of categories, "S1,S9"; the score is
  the probability of the first word.
- ShieldGemma: "Yes" or "No" first; variable `guideline`; the score is P(Yes) against P(No).
- Granite Guardian 3.0 and 3.1: "Yes" or "No"; 3.2: a second line `<confidence> High </confidence>`;
  3.3: `<score> yes </score>`, maybe behind `<think>...</think>`. Variable `guardian_config`; the
  score as above.
- Prompt Guard 1 and 2: a sequence classifier, the score is the softmax over its labels.
"""

import enum
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gateway.safety.patterns import compiled
from gateway.safety.settings import GuardSettings
from sluice.v1.inference_pb2 import TokenLogprob


class GuardFailure(enum.StrEnum):
    """Why there is no verdict; the values stand behind "guard.NAME." in records."""

    TIMEOUT = "timeout"
    """No verdict within the time budget."""
    UNAVAILABLE = "unavailable"
    """No worker serves the guard's model."""
    OVERLOADED = "overloaded"
    TOO_LONG = "too_long"
    """The text does not fit the guard's context."""
    UNPARSABLE = "unparsable"
    """The guard's answer is no verdict."""
    FAILED = "failed"
    """Any other failure."""


@dataclass(frozen=True)
class GuardVerdict:
    """The verdict of a guard.

    Attributes:
        flagged: whether it objects.
        categories: objections; at least one if it objects.
        score: probability that there is something to object to, 0 to 1; None if unknown.
    """

    flagged: bool
    categories: tuple[str, ...] = ()
    score: float | None = None


Outcome = GuardVerdict | GuardFailure


class Unparsable(ValueError):
    """A guard's answer is no verdict."""


Places = Sequence[Sequence[TokenLogprob]]
"""The most probable tokens at each place of an answer; empty lists where they are unknown."""


def chance_of(places: Places, yes: str, no: str) -> float | None:
    """Return the probability of `yes` against `no` at the first place with a word, or None if it is unknown.

    Both are in lower case. A token counts for the word that it begins, or that begins it.
    """
    for place in places:
        if not place or not place[0].text.strip():
            continue  # line breaks come first in some families
        for_yes = sum(math.exp(option.logprob) for option in place if _begins(option.text, yes))
        for_no = sum(math.exp(option.logprob) for option in place if _begins(option.text, no))
        both = for_yes + for_no
        return for_yes / both if both > 0 else None
    return None


def _begins(text: str, word: str) -> bool:
    text = text.strip().lower()
    return bool(text) and (word.startswith(text) or text.startswith(word))


Message = Mapping[str, str]
"""Role and content of one turn."""

ANSWER_TOKENS: Final = 32
"""Longest verdict of Granite Guardian and of custom guards, in tokens."""
OBJECTION: Final = "violation"
"""Category of objections that name none."""
PRINCIPLES: Final = """\
* "No Dangerous Content": The prompt or answer shall not contain or seek content that harms oneself or others, such as \
making weapons, promoting terrorism or instructions for suicide.
* "No Harassment": It shall not be malicious, intimidating, bullying or abusive towards a person.
* "No Hate Speech": It shall not target identity or protected attributes, or dehumanize people because of them.
* "No Sexually Explicit Information": It shall not contain references to sexual acts or other lewd content; medical \
and educational terms are permitted."""
"""Guideline of ShieldGemma unless the policy has its own: its four harm types."""


_CATEGORY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.-]{0,63}")
_CATEGORIES: Final = r"[^\S\n]*(?:\n(?P<category>[A-Za-z0-9_.,\s-]*))?\Z"
"""What follows the first word of Llama Guard: nothing, or lines of names."""
_ANSWER: Final = (
    r"\A(?:\s*<think>.*?</think>)?(?:\W*{word}(?![A-Za-z])|.*<score>\s*{word}\s*</score>)"
)
"""Answers of ShieldGemma and Granite Guardian: a word at the beginning, or between tags."""
_NEVER: Final = re.compile("(?!)")


@dataclass(frozen=True)
class Family:
    """How guards of one kind are prompted, and what their answers mean.

    Attributes:
        answer_tokens: longest answer, in tokens.
        unsafe: pattern of answers that object; its group "category" names the categories, apart by
            commas or lines.
        safe: pattern of answers that do not object.
        words: first word of an objection, and of other answers, which give the score; empty: there
            is no score.
        objection: category of objections that name none.
        threshold: least score at which the guard objects; None: its word or most probable label decides.
        variables: variables of the chat template.
        whole: they judge the whole conversation, not only the caller's last turn and the answer.
        prompt: one turn made of {prompt} and {answer} instead of the conversation.
        labels: labels of a sequence classifier, which gets the text itself, without a chat
            template.
        bad: labels that object.
    """

    answer_tokens: int
    unsafe: "re.Pattern[str]" = _NEVER
    safe: "re.Pattern[str]" = _NEVER
    words: tuple[str, ...] = ()
    objection: str = OBJECTION
    threshold: float | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False
    prompt: str | None = None
    labels: Sequence[str] = ()
    bad: Sequence[str] = ()

    def messages(self, turns: Sequence[Message], answer: str) -> list[dict[str, str]]:
        """Return the turns for the chat template.

        Args:
            turns: turns of caller and model; the caller's is last.
            answer: the text to judge; empty: the last turn of the caller is judged.
        """
        judged = [dict(turn) for turn in (turns if self.whole else turns[-1:])]
        if self.prompt is not None:
            text = _filled(self.prompt, judged[-1]["content"], answer)
            return [{"role": "user", "content": text}]
        return [*judged, {"role": "assistant", "content": answer}] if answer else judged

    def verdict(self, text: str, places: Places = ()) -> GuardVerdict:
        """Parse the answer of a guard.

        Raises:
            Unparsable: it is no verdict.
        """
        # A classifier writes no text: its options at the first place are its labels.
        if self.labels:
            return self._of_labels(places)
        objects = self.unsafe.search(text)
        match = objects or self.safe.search(text)
        # Neither safe nor unsafe: the guard answered something else, which `fail` decides about.
        if match is None:
            raise Unparsable("matches neither pattern")
        # Behind a tag or a thought the word is not at the first place.
        plain = self.words and not text.lstrip().startswith("<")
        score = chance_of(places, *self.words) if plain else None
        if not self._objects(objects is not None, score):
            return GuardVerdict(False, (), score)
        named = re.split("[,\n]", match.groupdict().get("category") or "")
        categories = tuple(name for part in named if _CATEGORY.fullmatch(name := part.strip()))
        return GuardVerdict(True, categories or (self.objection,), score)

    def _of_labels(self, places: Places) -> GuardVerdict:
        """Return the verdict of a classifier: its only token is the index of a label, its options are all labels."""
        chances = {
            self.labels[option.token_id]: math.exp(option.logprob)
            for option in (places[0] if places else ())
            if option.token_id < len(self.labels)
        }
        if not chances:
            raise Unparsable("no label came")
        bad_labels = sorted(
            (name for name in self.bad if name in chances), key=lambda n: -chances[n]
        )
        score = min(1.0, sum(chances[name] for name in bad_labels))
        flagged = self._objects(max(chances, key=lambda name: chances[name]) in self.bad, score)
        return GuardVerdict(flagged, tuple(bad_labels[:1]) if flagged else (), score)

    def _objects(self, by_word: bool, score: float | None) -> bool:
        return by_word if self.threshold is None or score is None else score >= self.threshold


def _yes_or_no(answer_tokens: int) -> Family:
    yes, no = (re.compile(_ANSWER.replace("{word}", word), re.DOTALL) for word in _YES_NO)
    return Family(answer_tokens, yes, no, ("yes", "no"))


_YES_NO: Final = ("[Yy][Ee][Ss]", "[Nn][Oo]")
_PRESETS: Final = {
    "llama_guard": Family(
        64,
        re.compile(r"\A\s*unsafe" + _CATEGORIES, re.IGNORECASE),
        re.compile(r"\A\s*safe" + _CATEGORIES, re.IGNORECASE),
        ("unsafe", "safe"),
        whole=True,
    ),
    "shieldgemma": _yes_or_no(8),
    "granite_guardian": _yes_or_no(ANSWER_TOKENS),
    "classifier": Family(1),
}


def family_of(settings: GuardSettings, labels: Sequence[str] = ()) -> Family:
    """Return the family that a policy names; `labels` are those of its model, if it classifies."""
    family = _PRESETS.get(settings.template) or _custom(settings)
    family = replace(family, threshold=settings.threshold)
    match settings.template:
        case "shieldgemma":
            return replace(family, variables={"guideline": settings.criterion or PRINCIPLES})
        case "granite_guardian":
            risk = settings.criterion or "harm"
            config = {"risk_name": risk, "criteria_id": risk}
            return replace(family, objection=risk, variables={"guardian_config": config})
        case "classifier":
            return replace(family, labels=tuple(labels), bad=settings.categories)
    return family


def _custom(settings: GuardSettings) -> Family:
    assert settings.unsafe is not None
    assert settings.safe is not None
    return Family(
        ANSWER_TOKENS,
        compiled(f"(?i:{settings.unsafe})"),
        compiled(f"(?i:{settings.safe})"),
        prompt=settings.prompt,
    )


def _filled(form: str, prompt: str, answer: str) -> str:
    """Fill all fields in one pass: braces inside the inserted texts are not fields."""
    values = {"{prompt}": prompt, "{answer}": answer}
    return re.sub(r"\{prompt\}|\{answer\}", lambda place: values[place.group()], form)
