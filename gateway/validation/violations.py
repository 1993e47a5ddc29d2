"""Collects what is wrong with a request, so that the caller learns all of it at once."""

from sluice.errors import FieldViolation, InvalidRequest


class FieldViolations:
    """The wrong fields found so far."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, field: str, description: str) -> None:
        """``field`` is wrong; ``description`` says what is right, without any text of a prompt."""
        self._found.append(FieldViolation(field, description))

    def check(self, holds: bool, field: str, description: str) -> None:
        """Adds ``field`` unless ``holds``."""
        if not holds:
            self.add(field, description)

    def error(self) -> InvalidRequest:
        """One error with all of them."""
        return InvalidRequest(
            "; ".join(f"{v.field}: {v.description}" for v in self._found), violations=self._found
        )

    def raise_if_any(self) -> None:
        """Raises `InvalidRequest` when something was found."""
        if self._found:
            raise self.error()
