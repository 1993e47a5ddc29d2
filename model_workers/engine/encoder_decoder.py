"""The engine of encoder-decoders (T5, BART, Marian, ...), on transformers' own model code.

The encoder reads a sequence's prompt once, together with the other texts of the step in groups of similar length. Then
its answer is decoded beside those of all other sequences, one token per step, at any position (continuous batching).
Keys and values of all sequences lie in one batch: answers end in the same column, texts (cross-attention, computed once
per sequence) begin in the first one.
"""

from collections import abc
from collections.abc import Collection, Iterator
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
    SequenceEnd,
    SequenceSpec,
    SequenceStep,
)
from model_workers.engine.sampling.sampler import DrawRequest, Sampler
from model_workers.engine.sequences import Sequence, SequenceLimits, SequenceState
from sluice.errors import InvalidRequest, PromptTooLong
from sluice.settings.models import SideLimits

COLUMNS: Final = 32
"""Minimum number of spare columns of a buffer."""


class SequencePositions(nn.Module):
    """Positions of each sequence, in place of a decoder's table of absolute positions.

    Attributes:
        places: Positions of the next pass, [sequences, tokens].
    """

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self._weight = table.weight
        self._offset = int(getattr(table, "offset", 0))
        self.places = torch.zeros((1, 1), dtype=torch.long)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return the embeddings of `places`; the arguments are those of the module that this one replaces."""
        return functional.embedding(self.places + self._offset, self._weight)


class Buffer:
    """Keys and values of one layer, each [sequences, heads, columns, size]; unwritten cells are zero."""

    def __init__(self, like: Tensor, sequences: int, columns: int) -> None:
        shape = sequences, like.shape[1], columns, like.shape[3]
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)

    def put(self, sequences: slice, columns: slice, keys: Tensor, values: Tensor) -> None:
        """Write a part."""
        self.keys[sequences, :, columns], self.values[sequences, :, columns] = keys, values

    def move(self, source: int, target: int) -> None:
        """Copy a sequence."""
        self.keys[target], self.values[target] = self.keys[source], self.values[source]

    def part(self, sequences: int, columns: slice) -> tuple[Tensor, Tensor]:
        """Return the first `sequences` without a copy."""
        return self.keys[:sequences, :, columns], self.values[:sequences, :, columns]


class BufferLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer of transformers' cache in a `Buffer`: the first sequences, from one column to another.

    The next column is written in place.
    """

    def __init__(self, buffer: Buffer, sequences: int, first: int, end: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffer, self._sequences, self._first, self._end = buffer, sequences, first, end
        self.keys, self.values = buffer.part(sequences, slice(first, end))
        self.dtype, self.device, self.is_initialized = self.keys.dtype, self.keys.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one more column; see `DynamicLayer.update`."""
        column = slice(self._end, self._end + 1)
        self._buffer.put(slice(0, self._sequences), column, key_states, value_states)
        return self._buffer.part(self._sequences, slice(self._first, self._end + 1))


class DecodingBatch:
    """The sequences that decode, with their keys and values.

    Sequences stand without gaps at the front of the buffers: the last one takes the place of one that leaves. Answers
    end in the same column, and texts begin in the first one.

    Attributes:
        sequences: Sequences in the order of the buffers.
    """

    def __init__(self, slots: int, text_max: int) -> None:
        """Create an empty batch; `text_max` is the maximum length of a text."""
        self.sequences: list[Sequence] = []
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
        """The position of each sequence's next token, [sequences, 1]."""
        return torch.tensor(self._lengths)[:, None]

    @property
    def text_mask(self) -> Tensor:
        """Mask of the columns of texts that are tokens, [sequences, columns]."""
        return (torch.arange(max(self._sizes)) < torch.tensor(self._sizes)[:, None]).long()

    @property
    def mask(self) -> Tensor:
        """Mask of the columns of answers that are tokens, the next one included, [sequences, columns]."""
        width = max(self._lengths) + 1
        starts = width - 1 - torch.tensor(self._lengths)[:, None]
        return (torch.arange(width) >= starts).long()

    def cache(self) -> EncoderDecoderCache:
        """Return the cache that the model reads, and writes the next tokens to; call `grew` after it."""
        sequences, width = len(self.sequences), max(self._sizes)
        self._make_room(max(self._lengths) + 1)
        first = self._end - max(self._lengths)
        own: list[Any] = [BufferLayer(buffer, sequences, first, self._end) for buffer in self._own]
        texts: list[Any] = [BufferLayer(buffer, sequences, 0, width) for buffer in self._texts]
        return EncoderDecoderCache(Cache(layers=own), Cache(layers=texts))

    def grew(self) -> None:
        """Count one more token of each sequence."""
        self._end += 1
        self._lengths = [length + 1 for length in self._lengths]

    def add(
        self,
        sequences: abc.Sequence[Sequence],
        length: int,
        sizes: abc.Sequence[int],
        cache: EncoderDecoderCache,
    ) -> None:
        """Add sequences with answers of `length` tokens and texts of `sizes`, computed in `cache`."""
        own: list[Any] = cache.self_attention_cache.layers
        texts: list[Any] = cache.cross_attention_cache.layers
        if not self._own:
            self._own = [Buffer(layer.keys, self._slots, 0) for layer in own]
            self._texts = [Buffer(layer.keys, self._slots, 0) for layer in texts]
        self._make_room(length)
        self._make_text_room(max(sizes))
        places = slice(len(self.sequences), len(self.sequences) + len(sequences))
        for buffer, layer in zip(self._own, own, strict=True):
            buffer.put(places, slice(self._end - length, self._end), layer.keys, layer.values)
        for buffer, layer in zip(self._texts, texts, strict=True):
            buffer.put(places, slice(0, max(sizes)), layer.keys, layer.values)
        self.sequences += sequences
        self._lengths += [length] * len(sequences)
        self._sizes += sizes

    def keep(self, sequences: Collection[Sequence]) -> None:
        """Drop all other sequences."""
        for place in reversed(range(len(self.sequences))):
            if self.sequences[place] not in sequences:
                self._drop(place)

    def _drop(self, place: int) -> None:
        last = len(self.sequences) - 1
        if place < last:
            for buffer in (*self._own, *self._texts):
                buffer.move(last, place)
        lists: tuple[list[Any], ...] = (self.sequences, self._lengths, self._sizes)
        for values in lists:
            values[place] = values[last]
            values.pop()

    def _make_room(self, length: int) -> None:
        """Make room for an answer of `length` and one more column, with a copy only when answers have doubled."""
        longest, columns = max((*self._lengths, length)), self._own[0].keys.shape[2]
        if longest <= self._end < columns:
            return
        longest_held, end = max(self._lengths, default=0), longest
        self._own = [
            self._moved(
                buffer, slice(self._end - longest_held, self._end), end, 2 * longest + COLUMNS
            )
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
        """Return a buffer of `width` columns, with `columns` of the old one before `end`."""
        new, sequences = Buffer(old.keys, self._slots, width), len(self.sequences)
        if sequences:
            start = end - (columns.stop - columns.start)
            new.put(slice(0, sequences), slice(start, end), *old.part(sequences, columns))
        return new


class EncoderDecoder:
    """The model: begins sequences, and computes the next token of all of them.

    Attributes:
        prefix: Tokens that begin every answer and are not part of it.
        vocab_size: Number of tokens.
        places_max: Maximum length of the encoder's output; 0: the length of the prompt.
        begins_max: Maximum number of sequences that begin in one step.
        trial: Sound of the sequence that warms the model up.
    """

    begins_max: ClassVar[int] = 1024
    trial: ClassVar[AudioSpec | None] = None
    places_max: int = 0

    def __init__(self, model: Any) -> None:
        self._model = model
        self._encode = PaddedTexts(model.get_encoder(), lambda output: output.last_hidden_state)
        decoder = model.get_decoder()
        table = getattr(decoder, "embed_positions", None)
        self._positions = None if table is None else SequencePositions(table)
        if self._positions is not None:
            decoder.embed_positions = self._positions
        self.prefix = answer_prefix(model)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self._never = ruled_out(model.generation_config)

    def begin(
        self, sequences: abc.Sequence[Sequence], batch: DecodingBatch
    ) -> Iterator[tuple[abc.Sequence[Sequence], Tensor]]:
        """Add new sequences to `batch`; yield them in groups with the logits of their next tokens."""
        states = dict(zip(sequences, self._states(sequences), strict=True))
        for _, group in groupby(
            sorted(sequences, key=_order), key=lambda sequence: len(self._decoder_tokens(sequence))
        ):
            members = list(group)
            yield members, self._begin(members, [states[sequence] for sequence in members], batch)

    def check(self, sequence: SequenceSpec) -> None:
        """Raise InvalidRequest for sequences that the encoder cannot read."""
        if sequence.audio is not None:
            raise InvalidRequest("this model takes text and no audio")

    def restrict(self, sequences: abc.Sequence[Sequence], logits: Tensor) -> None:
        """Exclude tokens in `logits`, [sequences, vocabulary]."""
        if self._never:
            logits[:, self._never] = -torch.inf

    def _states(self, sequences: abc.Sequence[Sequence]) -> abc.Sequence[Tensor]:
        """Return the encoder's output for each sequence, [positions, size]."""
        return self._encode([Text(sequence.spec.prompt) for sequence in sequences])

    def _decoder_tokens(self, sequence: Sequence) -> list[int]:
        """Return the decoder's tokens so far."""
        return [*self.prefix, *sequence.tokens[len(sequence.spec.prompt) :]]

    def _begin(
        self, sequences: abc.Sequence[Sequence], states: abc.Sequence[Tensor], batch: DecodingBatch
    ) -> Tensor:
        sizes = [len(state) for state in states]
        device = self._model.device
        padded = [functional.pad(state, (0, 0, 0, max(sizes) - len(state))) for state in states]
        mask = (torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]).long()
        tokens = [self._decoder_tokens(sequence) for sequence in sequences]
        length = len(tokens[0])
        places = torch.arange(length).expand(len(sequences), -1)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        texts = torch.stack(padded).to(device, self._model.dtype)
        logits = self._forward(tokens, places, cache, texts, mask, None)
        batch.add(sequences, length, sizes, cache)
        return logits

    def next(self, batch: DecodingBatch) -> Tensor:
        """Add the newest tokens to the cache; return the logits of each next token, [sequences, vocabulary]."""
        tokens, mask = [[sequence.tokens[-1]] for sequence in batch.sequences], batch.text_mask
        # Of the texts only the shape is asked for: their keys and values are in the cache.
        size = self._model.get_input_embeddings().weight.shape[1]
        texts = torch.zeros(1, dtype=self._model.dtype, device=self._model.device)
        texts = texts.expand(*mask.shape, size)
        logits = self._forward(tokens, batch.places, batch.cache(), texts, mask, batch.mask)
        batch.grew()
        return logits

    def _forward(
        self,
        tokens: abc.Sequence[abc.Sequence[int]],
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


def _order(sequence: Sequence) -> tuple[int, int]:
    """Return the sort key that puts equally long answers together."""
    return sequence.answered, len(sequence.spec.prompt)


class EncoderDecoderEngine(CachelessEngine):
    """An engine of an encoder-decoder; see `Engine`."""

    def __init__(
        self, model: EncoderDecoder, sampler: Sampler, limits: SequenceLimits, sides: SideLimits
    ) -> None:
        super().__init__(limits)
        self._model = model
        self.sampler = sampler
        self._sides = sides
        self._batch = DecodingBatch(limits.slots, model.places_max or sides.prompt)

    @override
    def add(self, sequence: SequenceSpec, now: float) -> None:
        if sequence.values is not None:
            raise InvalidRequest("this model gives answers, and no embeddings or scores")
        self._model.check(sequence)
        if max((*sequence.prompt, *sequence.produced), default=0) >= self._model.vocab_size:
            raise InvalidRequest(f"a token is not one of the model's {self._model.vocab_size}")
        if len(sequence.prompt) > self._sides.prompt:
            message = f"{len(sequence.prompt)} tokens; the encoder reads {self._sides.prompt}"
            raise PromptTooLong(f"the prompt has {message}")
        room = self._sides.answer - len(self._model.prefix)
        most = min(sequence.sampling.max_tokens, room)
        sequence = replace(sequence, sampling=replace(sequence.sampling, max_tokens=most))
        # Penalties are about what the decoder has said, as in transformers.
        sampling = self.sampler.open(replace(sequence, prompt=()))
        self._scheduler.add(sequence).sampling = sampling

    @torch.inference_mode()
    @override
    def step(self, now: float) -> list[SequenceStep]:
        self._steps += 1
        steps = [sequence.end_step(end) for sequence, end in self._scheduler.sweep(now)]
        planned = self._scheduler.schedule()
        decoding = {
            sequence
            for sequence, _ in planned
            if sequence in self._batch.sequences and sequence.pending == 1
        }
        self._batch.keep(decoding)  # the others have ended, or wait again
        new = []
        for sequence, count in planned:
            if sequence in decoding:
                continue
            if count == sequence.pending:
                new.append(sequence)
            else:
                self._scheduler.advance(sequence, count)
        if decoding:
            steps += self._draw(tuple(self._batch.sequences), self._model.next(self._batch))
        if new := new[: self._model.begins_max]:  # the others are planned again
            for sequences, logits in self._model.begin(new, self._batch):
                steps += self._draw(sequences, logits)
        self._batch.keep(
            {
                sequence
                for sequence in self._batch.sequences
                if sequence.state is SequenceState.RUNNING
            }
        )
        return steps

    @override
    def abort(self, message: str) -> list[SequenceStep]:
        self._batch.keep(())
        return super().abort(message)

    def _draw(self, sequences: abc.Sequence[Sequence], logits: Tensor) -> list[SequenceStep]:
        requests = []
        for sequence in sequences:
            assert sequence.sampling is not None
            requests.append(DrawRequest(sequence.sampling))
        self._model.restrict(sequences, logits)
        steps = []
        for sequence, drawn in zip(sequences, self.sampler.draw(logits, requests), strict=True):
            pending = sequence.pending
            step = sequence.take(drawn.token_ids, drawn.logprobs)
            self._scheduler.advance(sequence, pending)
            if drawn.error:
                step = step.failed(SequenceEnd.FAILED, drawn.error, drawn.field)
            if step.end is not None:
                self._scheduler.finish(sequence)
            steps.append(step)
        return steps
