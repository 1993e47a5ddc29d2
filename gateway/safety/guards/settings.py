"""The section ``guard:`` of a policy."""

from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gateway.safety.actions import Action, Choice
from gateway.safety.guards.patterns import PatternError, compile_pattern
from gateway.safety.spelling import ActionSpec, Name

Stage = Literal["input", "output"]
Template = Literal["llama_guard", "shieldgemma", "granite_guardian", "classifier", "custom"]

_ONLY_OF: Final[dict[str, tuple[str, ...]]] = {
    "shieldgemma": ("guideline",),
    "granite_guardian": ("risk",),
    "custom": ("prompt", "unsafe", "safe", "answer_tokens"),
}
"""Keys that mean something with one template alone."""
_NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "custom": ("prompt", "unsafe", "safe"),
    "classifier": ("categories",),
}


class GuardSettings(BaseModel):
    """One guard model of a policy."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    model: Name
    template: Template
    checks: tuple[Stage, ...] = ("input",)
    threshold: float | None = Field(None, gt=0, le=1)
    """From this score on the guard objects; unset: by its word, or the most probable label."""
    categories: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """What is acted on; anything else is flagged. Empty: everything is. Of a classifier: the labels that object."""
    action: ActionSpec = Choice(Action.BLOCK)
    fail: Literal["open", "closed"] = "open"
    """What happens without a verdict: the text passes, or it does not."""
    budget_s: float = Field(1.0, gt=0, le=60)
    """Longest wait for a verdict."""
    window_tokens: int = Field(64, ge=0)
    """An answer is checked each time it has grown by so many tokens; 0: at its end alone."""
    hold: bool = False
    """Nothing of an answer is shown before the verdict about all of it."""
    guideline: str | None = None
    risk: str | None = Field(None, pattern=r"^[a-z_]{1,64}$")
    prompt: str | None = None
    """With {prompt}, and {answer} where answers are checked."""
    unsafe: str | None = None
    """A pattern that objections match; its group "category" names what to."""
    safe: str | None = None
    """A pattern that verdicts without objection match."""
    answer_tokens: int | None = Field(None, ge=1, le=512)
    """Longest answer of the guard."""

    @field_validator("checks")
    @classmethod
    def _once_each(cls, checks: tuple[Stage, ...]) -> tuple[Stage, ...]:
        if not checks or len(set(checks)) != len(checks):
            raise ValueError("name input, output, or both")
        return checks

    @field_validator("action")
    @classmethod
    def _possible(cls, choice: Choice) -> Choice:
        if choice.action not in (Action.BLOCK, Action.FLAG, Action.ROUTE):
            raise ValueError("must be block, flag, or {route: MODEL}")
        return choice

    @field_validator("unsafe", "safe")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                compile_pattern(pattern)
            except PatternError as error:
                raise ValueError(str(error)) from None
        return pattern

    @field_validator("prompt")
    @classmethod
    def _has_place(cls, prompt: str | None) -> str | None:
        if prompt is not None and "{prompt}" not in prompt:
            raise ValueError("must say where the prompt stands: {prompt}")
        return prompt

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for template, keys in _ONLY_OF.items():
            for key in keys:
                if template != self.template and getattr(self, key) is not None:
                    raise ValueError(f"{key} goes with template {template} alone")
        for key in _NEEDED.get(self.template, ()):
            if not getattr(self, key):
                raise ValueError(f"template {self.template} needs {key}")
        if self.template == "custom" and self.threshold is not None:
            raise ValueError("threshold: a custom template gives no score")
        if self.action.action is Action.ROUTE and self.checks != ("input",):
            raise ValueError("an answer cannot be routed; use checks: [input]")
        if "output" in self.checks and self.prompt is not None and "{answer}" not in self.prompt:
            raise ValueError("prompt must say where the answer stands: {answer}")
        return self
