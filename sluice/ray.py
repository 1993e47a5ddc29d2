"""Answers as a step of a Ray Data pipeline, for data sets that outgrow one machine.

docs/use/ray.md says when a job is better.

    answered = ray.data.read_parquet("s3://docs").map_batches(
        Generate,
        fn_constructor_kwargs={"template": "Summarize: {text}", "model": "small", "max_tokens": 60},
        batch_size=256,
        concurrency=4,
    )

Ray itself is not imported here. Batches are of Ray's format "numpy", its default: a mapping of columns to arrays.
"""

from collections.abc import Mapping
from typing import Any, Final, Unpack

import grpc

from sluice.client import Answer, Client, GenerateOptions
from sluice.errors import SluiceError

COLUMNS: Final = ("answer", "model", "finish_reason", "prompt_tokens", "completion_tokens", "error")
"""What a row gets; of `error` and the others one side is null."""

_PASSING: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)

Batch = Mapping[str, Any]


class Generate:
    """A callable class for `map_batches`: one answer a row.

    An error that may pass fails the batch, after the client's own tries, and Ray runs it again; any other is the row's
    `error`. A batch whose actor was lost is computed again; its rows are in the output once.

    Args:
        template: makes the prompt of a row: "Summarize: {text}".
        address: of the gateways, as of `Client`.
        tenant: who pays.
        at_once: rows that one actor asks at the same time.
        prefix: stands before the names of the new columns.
        options: as of `Client.generate`; of class bulk unless told otherwise.
    """

    def __init__(
        self,
        template: str,
        address: str | None = None,
        tenant: str | None = None,
        at_once: int = 64,
        prefix: str = "",
        **options: Unpack[GenerateOptions],
    ) -> None:
        self._template = template
        self._at_once = at_once
        self._prefix = prefix
        self._options: GenerateOptions = {"priority": "bulk", **options}
        self._client = Client(address, tenant=tenant)

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with the new columns.

        Raises:
            SluiceError: answers cannot be had now.
            KeyError: the template names a column that the batch has not.
        """
        import numpy as np

        rows = zip(*batch.values(), strict=True)
        prompts = [self._template.format_map(dict(zip(batch, row, strict=True))) for row in rows]
        result = self._client.generate_batch(prompts, concurrency=self._at_once, **self._options)
        for outcome in result.outcomes:
            if isinstance(outcome, SluiceError) and outcome.code in _PASSING:
                raise outcome
        cells = [_cells(outcome) for outcome in result.outcomes]
        columns = zip(*cells, strict=True) if cells else ((),) * len(COLUMNS)
        named = zip(COLUMNS, columns, strict=True)
        return {**batch, **{self._prefix + key: np.array(one, dtype=object) for key, one in named}}


def _cells(outcome: Answer | SluiceError) -> tuple[Any, ...]:
    if isinstance(outcome, SluiceError):
        return (None, None, None, None, None, f"{outcome.reason}: {outcome}")
    usage = outcome.usage
    return (
        outcome.text,
        outcome.model,
        outcome.finish_reason.value,
        usage.prompt_tokens,
        usage.completion_tokens,
        None,
    )
