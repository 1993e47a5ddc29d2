"""Answers as a step of a Ray Data pipeline, for data sets that outgrow one machine (docs/use/ray.md: when a job is
better).

    answered = ray.data.read_parquet("s3://docs").map_batches(
        Generate,
        fn_constructor_kwargs={"template": "Summarize: {text}", "model": "small", "max_tokens": 60},
        batch_size=256,
        concurrency=4,
    )

Ray itself is not imported here. Batches are what Ray gives: a mapping of columns to arrays, a pandas DataFrame, or an
Arrow table; what goes in comes out, with more columns.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, Unpack, cast

import grpc

from sluice.client import Answer, Client, GenerateOptions
from sluice.errors import SluiceError

COLUMNS: Final = ("answer", "model", "finish_reason", "prompt_tokens", "completion_tokens", "error")
"""What a row gets; of `error` and the others one side is null."""

_PASSING: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)

B = TypeVar("B")


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

    def __call__(self, batch: B) -> B:
        """The batch with the new columns.

        Raises:
            SluiceError: answers cannot be had now.
            KeyError: the template names a column that the batch has not.
        """
        prompts = [self._template.format_map(row) for row in rows_of(batch)]
        asked = self._client.generate_batch(prompts, concurrency=self._at_once, **self._options)
        for outcome in asked.outcomes:
            if isinstance(outcome, SluiceError) and outcome.code in _PASSING:
                raise outcome
        cells = [_cells(outcome) for outcome in asked.outcomes]
        columns = zip(*cells, strict=True) if cells else ((),) * len(COLUMNS)
        named = {self._prefix + name: list(one) for name, one in zip(COLUMNS, columns, strict=True)}
        return cast("B", with_columns(batch, named))


def rows_of(batch: Any) -> Iterable[Mapping[str, Any]]:
    """The rows of a batch of any of the three kinds."""
    if hasattr(batch, "to_pylist"):
        return batch.to_pylist()  # type: ignore[no-any-return]
    if hasattr(batch, "to_dict"):
        return batch.to_dict("records")  # type: ignore[no-any-return]
    names = list(batch)
    return [dict(zip(names, row, strict=True)) for row in zip(*batch.values(), strict=True)]


def with_columns(batch: Any, columns: Mapping[str, Sequence[Any]]) -> Any:
    """The batch with more columns, of its own kind."""
    if hasattr(batch, "append_column"):
        import pyarrow as pa

        for name, values in columns.items():
            kind = pa.int64() if name.endswith("_tokens") else pa.string()
            batch = batch.append_column(name, pa.array(values, kind))
        return batch
    if hasattr(batch, "assign"):
        return batch.assign(**columns)
    import numpy as np

    return {**batch, **{name: np.array(one, dtype=object) for name, one in columns.items()}}


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
