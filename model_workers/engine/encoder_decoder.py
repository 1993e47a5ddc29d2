"""The engine of encoder-decoders (T5, BART, Marian and their kin), on transformers' own model code.

A row's prompt is what the encoder reads, once, together with the other texts of the step in groups of similar length.
Then its answer is decoded beside those of all other rows, one token a step, whatever their positions are (continuous
batching). Keys and values of all rows lie in one batch: those of the answers end in one column, those of the texts
(cross-attention, computed once a row) begin in one.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from typing_extensions import override

from model_workers.engine.cacheless import CachelessEngine
from model_workers.engine.forward.encoder import PaddedTexts, Text
from model_workers.engine.generation_config import answer_prefix, ruled_out
from model_workers.engine.protocol import (
    AudioSpec,
    RowEnd,
    RowInvalid,
    RowSpec,
    RowStep,
    RowTooLong,
)
from model_workers.engine.rows import Row, RowLimits, RowState
from model_workers.engine.sampling.sampler import DrawRequest, Sampler
from sluice.settings.models import SideLimits

COLUMNS: Final = 32
"""Columns for tokens that a buffer has at least beside those in use."""


class RowPositions(nn.Module):
    """Positions of each row's own, in place of a decoder's table of absolute positions.

    Attributes:
        places: [rows, tokens], of the next pass.
    """

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self._weight = table.weight
        self._offset = int(getattr(table, "offset", 0))
        self.places = torch.zeros((1, 1), dtype=torch.long)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """The embeddings of `places`; the arguments are those of the module that this one replaces."""
        return functional.embedding(self.places + self._offset, self._weight)


class Buffer:
    """Keys and values of one layer, each [rows, heads, columns, size]; what is not written is zero."""

    def __init__(self, like: Tensor, rows: int, columns: int) -> None:
        shape = rows, like.shape[1], columns, like.shape[3]
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)

    def put(self, rows: slice, columns: slice, keys: Tensor, values: Tensor) -> None:
        """Writes a part."""
        self.keys[rows, :, columns], self.values[rows, :, columns] = keys, values

    def move(self, source: int, target: int) -> None:
        """Copies a row."""
        self.keys[target], self.values[target] = self.keys[source], self.values[source]

    def part(self, rows: int, columns: slice) -> tuple[Tensor, Tensor]:
        """The first ``rows``, without a copy."""
        return self.keys[:rows, :, columns], self.values[:rows, :, columns]


class BufferLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer of transformers' cache that lies in a `Buffer`: of the first rows, from one column to another.

    The next column is written in place.
    """

    def __init__(self, buffer: Buffer, rows: int, first: int, end: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffer, self._rows, self._first, self._end = buffer, rows, first, end
        self.keys, self.values = buffer.part(rows, slice(first, end))
        self.dtype, self.device, self.is_initialized = self.keys.dtype, self.keys.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """See `DynamicLayer.update`; one more column."""
        column = slice(self._end, self._end + 1)
        self._buffer.put(slice(0, self._rows), column, key_states, value_states)
        return self._buffer.part(self._rows, slice(self._first, self._end + 1))


class Batch:
    """The rows that decode, with their keys and values.

    Rows stand without gaps at the front of the buffers: the last one takes the place of one that leaves. Answers end in
    the same column, and texts begin in the first one.

    Attributes:
        rows: in the order of the buffers.
    """

    def __init__(self, slots: int, text_max: int) -> None:
        """``text_max``: the longest that a text can be."""
        self.rows: list[Row] = []
        self._slots = slots
        self._text_max = text_max
        self._lengths: list[int] = []
        """Lengths of the answers, with the tokens before them."""
        self._sizes: list[int] = []
        """Lengths of the texts."""
        self._own: list[Buffer] = []
        self._texts: list[Buffer] = []
        self._end = 0
        """The column behind the newest tokens."""

    @property
    def places(self) -> Tensor:
        """The position of each row's next token, [rows, 1]."""
        return torch.tensor(self._lengths)[:, None]

    @property
    def text_mask(self) -> Tensor:
        """Which columns of the texts are tokens, [rows, columns]."""
        return (torch.arange(max(self._sizes)) < torch.tensor(self._sizes)[:, None]).long()

    @property
    def mask(self) -> Tensor:
        """Which columns of the answers are tokens, the next one included, [rows, columns]."""
        width = max(self._lengths) + 1
        starts = width - 1 - torch.tensor(self._lengths)[:, None]
        return (torch.arange(width) >= starts).long()

    def cache(self) -> EncoderDecoderCache:
        """What transformers' models read, and write the next tokens to; then call `grew`."""
        rows, width = len(self.rows), max(self._sizes)
        self._make_room(max(self._lengths) + 1)
        first = self._end - max(self._lengths)
        own: list[Any] = [BufferLayer(buffer, rows, first, self._end) for buffer in self._own]
        texts: list[Any] = [BufferLayer(buffer, rows, 0, width) for buffer in self._texts]
        return EncoderDecoderCache(Cache(layers=own), Cache(layers=texts))

    def grew(self) -> None:
        """Each row has a token more."""
        self._end += 1
        self._lengths = [length + 1 for length in self._lengths]

    def add(
        self, rows: Sequence[Row], length: int, sizes: Sequence[int], cache: EncoderDecoderCache
    ) -> None:
        """Adds rows with answers of ``length`` tokens and texts of ``sizes``, computed in ``cache``."""
        own: list[Any] = cache.self_attention_cache.layers
        texts: list[Any] = cache.cross_attention_cache.layers
        if not self._own:
            self._own = [Buffer(layer.keys, self._slots, 0) for layer in own]
            self._texts = [Buffer(layer.keys, self._slots, 0) for layer in texts]
        self._make_room(length)
        self._make_text_room(max(sizes))
        places = slice(len(self.rows), len(self.rows) + len(rows))
        for buffer, layer in zip(self._own, own, strict=True):
            buffer.put(places, slice(self._end - length, self._end), layer.keys, layer.values)
        for buffer, layer in zip(self._texts, texts, strict=True):
            buffer.put(places, slice(0, max(sizes)), layer.keys, layer.values)
        self.rows += rows
        self._lengths += [length] * len(rows)
        self._sizes += sizes

    def keep(self, rows: Collection[Row]) -> None:
        """Drops all others."""
        for place in reversed(range(len(self.rows))):
            if self.rows[place] not in rows:
                self._drop(place)

    def _drop(self, place: int) -> None:
        last = len(self.rows) - 1
        if place < last:
            for buffer in (*self._own, *self._texts):
                buffer.move(last, place)
        lists: tuple[list[Any], ...] = (self.rows, self._lengths, self._sizes)
        for values in lists:
            values[place] = values[last]
            values.pop()

    def _make_room(self, length: int) -> None:
        """For an answer of ``length``, and a column more: a copy at most once in as many steps as it is long."""
        longest, columns = max((*self._lengths, length)), self._own[0].keys.shape[2]
        if longest <= self._end < columns:
            return
        held, end = max(self._lengths, default=0), longest
        self._own = [
            self._moved(buffer, slice(self._end - held, self._end), end, 2 * longest + COLUMNS)
            for buffer in self._own
        ]
        self._end = end

    def _make_text_room(self, size: int) -> None:
        columns = self._texts[0].keys.shape[2]
        if size > columns:
            width = max(size, min(2 * size, self._text_max))
            self._texts = [
                self._moved(buffer, slice(0, columns), columns, width) for buffer in self._texts
            ]

    def _moved(self, old: Buffer, columns: slice, end: int, width: int) -> Buffer:
        """A buffer of ``width`` columns, ``columns`` of the old one before ``end``."""
        new, rows = Buffer(old.keys, self._slots, width), len(self.rows)
        if rows:
            start = end - (columns.stop - columns.start)
            new.put(slice(0, rows), slice(start, end), *old.part(rows, columns))
        return new


class EncoderDecoder:
    """The model: begins rows, and computes the next token of all of them.

    Attributes:
        prefix: the tokens that begin every answer and are no part of it.
        vocab_size: tokens.
        places_max: most places that the encoder makes of a row; 0: as many as a prompt has tokens.
        begins_max: most rows that it begins in one step.
        trial: what a row hears that warms the model up.
    """

    begins_max: ClassVar[int] = 1024
    trial: ClassVar[AudioSpec | None] = None
    places_max: int = 0

    def __init__(self, model: Any) -> None:
        self._model = model
        self._encode = PaddedTexts(model.get_encoder(), lambda output: output.last_hidden_state)
        decoder = model.get_decoder()
        table = getattr(decoder, "embed_positions", None)
        self._positions = None if table is None else RowPositions(table)
        if self._positions is not None:
            decoder.embed_positions = self._positions
        self.prefix = answer_prefix(model)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self._never = ruled_out(model.generation_config)

    def begin(self, rows: Sequence[Row], batch: Batch) -> Iterator[tuple[Sequence[Row], Tensor]]:
        """Adds new rows to ``batch``; yields them in groups with the logits of their next tokens."""
        states = dict(zip(rows, self._states(rows), strict=True))
        for _, group in groupby(sorted(rows, key=_order), key=lambda row: len(self._said(row))):
            members = list(group)
            yield members, self._begin(members, [states[row] for row in members], batch)

    def check(self, row: RowSpec) -> None:
        """Raises RowInvalid for what the encoder does not take."""
        if row.audio is not None:
            raise RowInvalid("this model takes text and no audio")

    def restrict(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Rules tokens out of ``logits``, [rows, vocabulary]."""
        if self._never:
            logits[:, self._never] = -torch.inf

    def _states(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """What the encoder makes of each row, [places, size]."""
        return self._encode([Text(row.spec.prompt) for row in rows])

    def _said(self, row: Row) -> list[int]:
        """The decoder's tokens so far."""
        return [*self.prefix, *row.tokens[len(row.spec.prompt) :]]

    def _begin(self, rows: Sequence[Row], states: Sequence[Tensor], batch: Batch) -> Tensor:
        sizes = [len(state) for state in states]
        device = self._model.device
        padded = [functional.pad(one, (0, 0, 0, max(sizes) - len(one))) for one in states]
        mask = (torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]).long()
        tokens = [self._said(row) for row in rows]
        length = len(tokens[0])
        places = torch.arange(length).expand(len(rows), -1)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        texts = torch.stack(padded).to(device, self._model.dtype)
        logits = self._forward(tokens, places, cache, texts, mask, None)
        batch.add(rows, length, sizes, cache)
        return logits

    def next(self, batch: Batch) -> Tensor:
        """The logits of the next token of each row, [rows, vocabulary]; the newest ones are in the cache then."""
        tokens, mask = [[row.tokens[-1]] for row in batch.rows], batch.text_mask
        # Of the texts only the shape is asked for: their keys and values are in the cache.
        size = self._model.get_input_embeddings().weight.shape[1]
        texts = torch.zeros(1, dtype=self._model.dtype, device=self._model.device)
        texts = texts.expand(*mask.shape, size)
        logits = self._forward(tokens, batch.places, batch.cache(), texts, mask, batch.mask)
        batch.grew()
        return logits

    def _forward(
        self,
        tokens: Sequence[Sequence[int]],
        places: Tensor,
        cache: EncoderDecoderCache,
        texts: Tensor,
        text_mask: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        device = self._model.device
        if self._positions is not None:
            self._positions.places = places.to(device)
        output = self._model(
            decoder_input_ids=torch.tensor(tokens, device=device),
            decoder_attention_mask=None if mask is None else mask.to(device),
            encoder_outputs=BaseModelOutput(last_hidden_state=texts),
            attention_mask=text_mask.to(device),
            past_key_values=cache,
            use_cache=True,
        )
        logits: Tensor = output.logits[:, -1].float()
        return logits


def _order(row: Row) -> tuple[int, int]:
    """Equally long answers are computed together."""
    return row.answered, len(row.spec.prompt)


class EncoderDecoderEngine(CachelessEngine):
    """Texts in, answers out; see `Engine`."""

    def __init__(
        self, model: EncoderDecoder, sampler: Sampler, limits: RowLimits, sides: SideLimits
    ) -> None:
        super().__init__(limits)
        self._model = model
        self.sampler = sampler
        self._sides = sides
        self._batch = Batch(limits.slots, model.places_max or sides.prompt)

    @override
    def add(self, row: RowSpec, now: float) -> None:
        if row.values is not None:
            raise RowInvalid("this model gives answers, and no embeddings or scores")
        self._model.check(row)
        if max((*row.prompt, *row.produced), default=0) >= self._model.vocab_size:
            raise RowInvalid(f"a token is not one of the model's {self._model.vocab_size}")
        if len(row.prompt) > self._sides.prompt:
            message = f"{len(row.prompt)} tokens; the encoder reads {self._sides.prompt}"
            raise RowTooLong(f"the prompt has {message}")
        room = self._sides.answer - len(self._model.prefix)
        most = min(row.sampling.max_tokens, room)
        row = replace(row, sampling=replace(row.sampling, max_tokens=most))
        # Penalties are about what the decoder has said, as in transformers.
        sampling = self.sampler.open(replace(row, prompt=()))
        self._scheduler.add(row).sampling = sampling

    @torch.inference_mode()
    @override
    def step(self, now: float) -> list[RowStep]:
        self._steps += 1
        steps = [row.end_step(end) for row, end in self._scheduler.sweep(now)]
        planned = self._scheduler.schedule()
        decoding = {row for row, _ in planned if row in self._batch.rows and row.pending == 1}
        self._batch.keep(decoding)  # the others have ended, or wait again
        new = []
        for row, count in planned:
            if row in decoding:
                continue
            if count == row.pending:
                new.append(row)
            else:
                self._scheduler.advance(row, count)
        if decoding:
            steps += self._draw(tuple(self._batch.rows), self._model.next(self._batch))
        if new := new[: self._model.begins_max]:  # the others are planned again
            for rows, logits in self._model.begin(new, self._batch):
                steps += self._draw(rows, logits)
        self._batch.keep({row for row in self._batch.rows if row.state is RowState.RUNNING})
        return steps

    @override
    def abort(self, message: str) -> list[RowStep]:
        self._batch.keep(())
        return super().abort(message)

    def _draw(self, rows: Sequence[Row], logits: Tensor) -> list[RowStep]:
        requests = []
        for row in rows:
            assert row.sampling is not None
            requests.append(DrawRequest(row.sampling))
        self._model.restrict(rows, logits)
        steps = []
        for row, drawn in zip(rows, self.sampler.draw(logits, requests), strict=True):
            pending = row.pending
            step = row.take(drawn.token_ids, drawn.logprobs)
            self._scheduler.advance(row, pending)
            if drawn.error:
                step = step.failed(RowEnd.FAILED, drawn.error, drawn.field)
            if step.end is not None:
                self._scheduler.finish(row)
            steps.append(step)
        return steps
