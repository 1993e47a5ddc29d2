"""How names and actions are written in a policy."""

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, PlainSerializer

from gateway.safety.actions import Action, Choice

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
_PLAIN: Final = {a.name.lower(): a for a in Action if a is not Action.ROUTE}


def _read_choice(value: object) -> Choice:
    if isinstance(value, Choice):
        return value
    if isinstance(value, str) and value in _PLAIN:
        return Choice(_PLAIN[value])
    if isinstance(value, dict) and list(value) == ["route"] and isinstance(value["route"], str):
        return Choice(Action.ROUTE, value["route"])
    raise ValueError(f"must be one of {', '.join(_PLAIN)}, or {{route: MODEL}}")


def _write_choice(choice: Choice) -> str | dict[str, str | None]:
    return {"route": choice.model} if choice.action is Action.ROUTE else choice.action.name.lower()


ActionSpec = Annotated[
    Choice, BeforeValidator(_read_choice), PlainSerializer(_write_choice, return_type=Any)
]
"""An action, or ``{route: MODEL}``."""
