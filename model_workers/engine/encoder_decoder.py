"""The engine of encoder-decoders (T5, BART, Marian, ...), on transformers' own model code.

The encoder reads a sequence's prompt once, together with the other texts of the step in groups of similar length. Then
its answer is decoded beside those of all other sequences, one token per step, at any position (continuous batching).
Keys and values of all sequences lie in one batch, those of the text (cross-attention) once per sequence.
"""

from collections import abc
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from typing_extensions import override

from model_workers.engine.cacheless import CachelessEngine
from model_workers.engine.forward.encoder import PaddedTexts
from model_workers.engine.generation_config import answer_prefix, limit_sides, ruled_out
from model_workers.engine.protocol import SequenceEnd, SequenceSpec, SequenceStep
from model_workers.engine.sampling.sampler import DrawRequest, Sampler
from model_workers.engine.sequences import Sequence, SequenceLimits, SequenceState
from sluice.errors import InvalidRequest
from sluice.internal.v1.task_pb2 import Audio
from sluice.settings.models import SideLimits


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


class DecodingBatch:
    """The sequences that decode, with their keys and values.

    Answers end in the last column of the cache, texts begin in its first one; the other cells are masked.

    Attributes:
        sequences: Sequences in the order of the cache.
        cache: The cache that the model reads, and writes the next tokens to; call `grew` after it.
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.cache = EncoderDecoderCache(())
        self._lengths: list[int] = []
        """Lengths of the answers, with the tokens before them."""
        self._sizes: list[int] = []
        """Lengths of the texts."""

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

    def grew(self) -> None:
        """Count one more token of each sequence."""
        self._lengths = [length + 1 for length in self._lengths]

    def add(
        self,
        sequences: abc.Sequence[Sequence],
        length: int,
        sizes: abc.Sequence[int],
        cache: EncoderDecoderCache,
    ) -> None:
        """Add sequences with answers of `length` tokens and texts of `sizes`, computed in `cache`."""
        layers = _layers(cache)
        if self.sequences:
            layers = [
                (
                    *(_joined(pair, from_end=True) for pair in zip(old[:2], new[:2], strict=True)),
                    *(_joined(pair, from_end=False) for pair in zip(old[2:], new[2:], strict=True)),
                )
                for old, new in zip(_layers(self.cache), layers, strict=True)
            ]
        self.cache = EncoderDecoderCache(layers)
        self.sequences += sequences
        self._lengths += [length] * len(sequences)
        self._sizes += sizes

    def keep(self, sequences: Collection[Sequence]) -> None:
        """Drop all other sequences, and the columns that only they had."""
        places = [place for place, one in enumerate(self.sequences) if one in sequences]
        if len(places) == len(self.sequences):
            return
        self.sequences = [self.sequences[place] for place in places]
        self._lengths = [self._lengths[place] for place in places]
        self._sizes = [self._sizes[place] for place in places]
        longest, widest = max(self._lengths, default=0), max(self._sizes, default=0)
        self.cache = EncoderDecoderCache(
            [
                (
                    *(own[places, :, own.shape[2] - longest :] for own in layer[:2]),
                    *(texts[places, :, :widest] for texts in layer[2:]),
                )
                for layer in (_layers(self.cache) if places else ())
            ]
        )


def _layers(cache: EncoderDecoderCache) -> list[tuple[Tensor, ...]]:
    """Return keys and values of the answers and of the texts by layer, [sequences, heads, columns, size]."""
    caches = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
    layers: list[Any] = list(caches)
    return [(own.keys, own.values, texts.keys, texts.values) for own, texts in layers]


def _joined(parts: tuple[Tensor, Tensor], *, from_end: bool) -> Tensor:
    """Join the sequences of both, with the shorter columns padded at their beginning or end."""
    width = max(part.shape[2] for part in parts)
    padded = []
    for part in parts:
        missing = width - part.shape[2]
        sides = (missing, 0) if from_end else (0, missing)
        padded.append(functional.pad(part, (0, 0, *sides)))
    return torch.cat(padded)


class EncoderDecoder:
    """The model: begins sequences, and computes the next token of all of them.

    Attributes:
        prefix: Tokens that begin every answer and are not part of it.
        vocab_size: Number of tokens.
        begins_max: Maximum number of sequences that begin in one step.
        trial: Sound of the sequence that warms the model up.
    """

    begins_max: ClassVar[int] = 1024
    trial: ClassVar[Audio | None] = None

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
        return self._encode([sequence.spec.prompt for sequence in sequences])

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
        logits = self._forward(tokens, batch.places, batch.cache, texts, mask, batch.mask)
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
        super().__init__(replace(limits, vocab_size=model.vocab_size))
        self._model = model
        self.sampler = sampler
        self._sides = sides
        self._batch = DecodingBatch()

    @override
    def add(self, sequence: SequenceSpec, now: float) -> None:
        if sequence.values is not None:
            raise InvalidRequest("this model gives answers, and no embeddings or scores")
        self._model.check(sequence)
        sequence = limit_sides(sequence, self._sides, len(self._model.prefix))
        # Penalties are about what the decoder has said, as in transformers.
        sampling = self.sampler.open(replace(sequence, prompt=()))
        self._scheduler.add(sequence).sampling = sampling

    @torch.inference_mode()
    @override
    def step(self, now: float) -> list[SequenceStep]:
        self._steps += 1
        steps = [sequence.end_step(end) for sequence, end in self._scheduler.sweep(now)]
        planned = self._scheduler.schedule()
        computed = set(self._batch.sequences)
        decoding = {one for one, _ in planned if one in computed and one.pending == 1}
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
        running = [one for one in self._batch.sequences if one.state is SequenceState.RUNNING]
        self._batch.keep(running)
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
