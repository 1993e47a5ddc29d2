"""Tokenizers of Marian models, whose folders have no tokenizer.json but two files.

    source.spm     SentencePiece model: the pieces of the prompt's language, and normalization
    vocab.json     ids of the pieces of both languages, of special tokens, and of ">>fra<<" in multilingual models

source.spm cuts a prompt into pieces, whose ids come from vocab.json. Answers are pieces of either language. Ids are
those of transformers' MarianTokenizer.
"""

from collections.abc import Mapping
from typing import Final

from tokenizers import Tokenizer, decoders, models, processors

_SPECIAL: Final = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class PieceTokenizer:
    """The tokenizer of prompts."""

    def __init__(self, source: bytes, ids: Mapping[str, int], unknown: int) -> None:
        """Load the tokenizer.

        Args:
            source: Content of source.spm.
            ids: Ids by piece, without special tokens.
            unknown: Id of pieces without an id.

        Raises:
            ValueError: `source` is not a SentencePiece model.
        """
        # Imported here: a gateway without Marian models does not need it.
        from sentencepiece import SentencePieceProcessor

        self._pieces = SentencePieceProcessor()
        try:
            self._pieces.LoadFromSerializedProto(source)
        except RuntimeError as error:
            raise ValueError("source.spm is not a SentencePiece model; copy it again") from error
        self._ids, self._unknown = ids, unknown

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, which may begin with the target language: `>>fra<< text`."""
        end = text.find("<<") + 2 if text.startswith(">>") else 0
        code = [text[:end]] if end > 2 else []
        pieces = [*code, *self._pieces.encode(text[end:] if code else text, return_type=str)]
        return [self._ids.get(piece, self._unknown) for piece in pieces]

    def ends(self, text: str) -> list[int]:
        """Return where each piece of `text` ends, in characters."""
        return [
            end for _, end in self._pieces.encode(text, return_type="offset_mapping")["offsets"]
        ]


def marian_tokenizers(
    source: bytes, vocabulary: Mapping[str, int], named: Mapping[str, str]
) -> tuple[Tokenizer, PieceTokenizer]:
    """Return the tokenizer of answers, and that of prompts.

    Args:
        source: Content of source.spm.
        vocabulary: Content of vocab.json.
        named: Special tokens that tokenizer_config.json names.

    Raises:
        ValueError: A file is invalid.
    """
    special = [named.get(name, token) for name, token in _SPECIAL.items()]
    absent = [token for token in special if token not in vocabulary]
    if absent:
        raise ValueError(f"vocab.json lacks {', '.join(absent)}")
    end, unknown = special[0], special[1]
    answers = Tokenizer(models.WordLevel(dict(vocabulary), unk_token=unknown))
    answers.add_special_tokens(special)
    answers.decoder = decoders.Metaspace(replacement="▁")
    ends = [(end, vocabulary[end])]
    answers.post_processor = processors.TemplateProcessing(f"$A {end}", f"$A $B {end}", ends)
    # Without special tokens: the text of one in a prompt must not become that token.
    ids = {piece: number for piece, number in vocabulary.items() if piece not in special}
    return answers, PieceTokenizer(source, ids, vocabulary[unknown])
