"""Writes what `sluice router train` learns from: how a weak and a strong model did on the same prompts."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sluice.cli.failure import CommandFailed
from sluice.cli.questions import Question
from sluice.cli.scores import Result

COLUMNS: Final = ("prompt_id", "prompt", "weak", "strong", "weak_response")


class OutcomesFile:
    """A file that is there when it is whole.

    Raises:
        CommandFailed: it cannot be written; told at once, before anything is asked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._scratch = path.with_name(f".{path.name}.writing")
        try:
            self._file = self._scratch.open("w", newline="", encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from error

    def write(
        self, questions: Sequence[Question], weak: Sequence[Result], strong: Sequence[Result]
    ) -> int:
        """Writes a row for each question that both models answered, unless there is none; returns how many."""
        rows = [
            (q.prompt_id, q.prompt, int(w.right), int(s.right), w.text)
            for q, w, s in zip(questions, weak, strong, strict=True)
            if not w.error and not s.error
        ]
        if not rows:
            return 0
        try:
            with self._file:
                writer = csv.writer(self._file)
                writer.writerow(COLUMNS)
                writer.writerows(rows)
            self._scratch.replace(self._path)
        except OSError as error:
            raise self._failed(error) from error
        return len(rows)

    def close(self) -> None:
        """Leaves nothing behind of what was not written."""
        self._file.close()
        self._scratch.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> CommandFailed:
        return CommandFailed("FILE", f"{self._path} cannot be written: {error.strerror}")
