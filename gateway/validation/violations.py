"""Collects the wrong fields of a request, so that one error names all of them."""

from sluice.errors import FieldViolation, InvalidRequest


class FieldViolations:
    """The wrong fields found so far."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, field: str, description: str) -> None:
        """``field`` is wrong; ``description`` says what would be valid, and quotes no text of a prompt."""
        self._found.append(FieldViolation(field, description))

    def check(self, holds: bool, field: str, description: str) -> None:
        """Adds ``field`` unless ``holds``."""
        if not holds:
            self.add(field, description)

    def raise_if_any(self) -> None:
        """Raises one `InvalidRequest` with all of them."""
        if self._found:
            message = "; ".join(f"{v.field}: {v.description}" for v in self._found)
            raise InvalidRequest(message, violations=self._found)
