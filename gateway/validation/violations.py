"""Collects the wrong fields of a request, so that one error names all of them."""

from typing import Final

from sluice.errors import FieldViolation, InvalidRequest

NAMED_MAX: Final = 16
"""An error travels in the trailers of a call, which have room for a few kilobytes."""


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
