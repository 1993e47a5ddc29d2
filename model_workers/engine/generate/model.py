"""A model of transformers with `generate()`: its inputs for a batch of sequences, and which sequences share a batch."""

import re
from collections import abc
from collections.abc import Hashable, Mapping
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from model_workers.engine.generation_config import answer_prefix, pad_token, ruled_out
from model_workers.engine.protocol import SequenceSpec
from model_workers.engine.sequences import Sequence
from sluice.errors import InvalidRequest

_TOKEN: Final = re.compile(r"token_(id|ids|index)$")
_MEDIA: Final = re.compile(r"image|video|vision|audio|speech")


class Batching(StrEnum):
    """Which sequences may share a batch; the values are for the log."""

    PADDED = "padded batches"
    EQUAL_LENGTHS = "batches of equal length: padding changes its answers"
    ALONE = "one request at a time: a batch changes its answers"


class GenerateModel:
    """The model, and how its batches are made.

    Attributes:
        vocab_size: Number of tokens.
        pad: Token that pads shorter sequences.
        prefix: Tokens that begin every answer of an encoder-decoder and are not part of it.
        batching: Which sequences may share a batch.
        reads_first: Whether it is an encoder-decoder.
    """

    def __init__(self, model: Any, batching: Batching = Batching.PADDED) -> None:
        self._model = model
        own = model.generation_config
        self.batching = batching
        self.reads_first = bool(model.config.is_encoder_decoder)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.pad = pad_token(own)
        self.prefix = answer_prefix(model) if self.reads_first else ()
        self._named, self._media = _named_tokens(model.config.to_dict())
        self._never = ruled_out(own)
        self._never_first = list(own.begin_suppress_tokens or ())
        # What else the model's own file says (sampling, beams, penalties, ends) is the request's to say.
        model.generation_config = _configuration(
            pad_token_id=self.pad,
            bos_token_id=own.bos_token_id,
            decoder_start_token_id=self.prefix[0] if self.prefix else None,
        )

    def group(self, sequence: Sequence) -> Hashable:
        """Return a key; sequences of equal keys may share a batch."""
        if self.batching is Batching.ALONE:
            return sequence.spec.request_id
        # Decoders with absolute positions count padding as tokens, so answers are not padded at their beginning.
        answered = sequence.answered if self.reads_first else 0
        return answered, 0 if self.batching is Batching.PADDED else len(sequence.tokens)

    def restrict(self, sequences: abc.Sequence[Sequence], logits: Tensor) -> None:
        """Exclude the tokens of the model's own generation_config.json in `logits`, [sequences, vocabulary]."""
        logits[:, self._never] = -torch.inf
        for place, sequence in enumerate(sequences):
            if not sequence.answered:
                logits[place, self._never_first] = -torch.inf

    @torch.inference_mode()
    def generate(
        self,
        sequences: abc.Sequence[abc.Sequence[int]],
        answered: int,
        tokens: int,
        *,
        logits_processor: abc.Sequence[Any] = (),
        **options: Any,
    ) -> Any:
        """Call the model's `generate()` for up to `tokens` more tokens of each sequence; see `inputs`.

        Args:
            sequences: Token ids of prompt and answer.
            answered: Number of answer tokens of each sequence.
            tokens: Maximum number of new tokens.
            logits_processor: As of transformers.
            options: Options of the GenerationConfig.
        """
        return self._model.generate(
            **self.inputs(sequences, answered),
            generation_config=_configuration(
                max_new_tokens=tokens, do_sample=False, num_beams=1, **options
            ),
            logits_processor=LogitsProcessorList(logits_processor),
        )

    def trial_prompt(self, length: int) -> list[int]:
        """Return plain tokens: none that stands for a picture or ends an answer."""
        plain = [token for token in range(self.vocab_size) if token not in self._named]
        return [plain[(7 * place + 3) % len(plain)] for place in range(length)]

    def check(self, sequence: SequenceSpec) -> None:
        """Raise InvalidRequest for tokens that stand for other things than text."""
        media = self._media.intersection(sequence.prompt)
        if media:
            raise InvalidRequest(
                f"prompt: token {min(media)} stands for a picture or sound, send text"
            )

    def inputs(
        self, sequences: abc.Sequence[abc.Sequence[int]], answered: int
    ) -> dict[str, Tensor]:
        """Return padded tensors of `sequences`, whose last `answered` tokens are the answer so far."""
        if not self.reads_first:
            return self._padded(sequences, left=True)
        texts = [sequence[: len(sequence) - answered] for sequence in sequences]
        answers = [[*self.prefix, *sequence[len(sequence) - answered :]] for sequence in sequences]
        inputs = self._padded(texts, left=False)
        inputs["decoder_input_ids"] = torch.tensor(answers, device=self._model.device)
        return inputs

    def _padded(
        self, sequences: abc.Sequence[abc.Sequence[int]], *, left: bool
    ) -> dict[str, Tensor]:
        longest = max(map(len, sequences))
        ids = torch.full((len(sequences), longest), self.pad)
        mask = torch.zeros_like(ids)
        for place, sequence in enumerate(sequences):
            columns = slice(longest - len(sequence), None) if left else slice(0, len(sequence))
            ids[place, columns] = torch.tensor(sequence)
            mask[place, columns] = 1
        device = self._model.device
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _configuration(**options: Any) -> Any:
    make: Any = GenerationConfig
    return make(**options)


def _named_tokens(config: Mapping[str, Any]) -> tuple[set[int], set[int]]:
    """Return the tokens that a configuration names, and of these the ones that stand for pictures or sounds."""
    token_ids: set[int] = set()
    media: set[int] = set()
    for key, value in config.items():
        if isinstance(value, Mapping):
            more = _named_tokens(value)
            token_ids |= more[0]
            media |= more[1]
        elif _TOKEN.search(str(key)):
            values = value if isinstance(value, list) else [value]
            tokens = {token for token in values if isinstance(token, int)}
            token_ids |= tokens
            media |= tokens if _MEDIA.search(key) else set()
    return token_ids, media
