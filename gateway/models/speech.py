"""What the decoder of a Whisper model begins with, as its folder says and transformers' `generate` has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer

from sluice.settings.models import chunk_s

_PREVIOUS: Final = "<|startofprev|>"


@dataclass(frozen=True)
class SpeechTokens:
    """The control tokens of a model that takes audio.

    Attributes:
        start: begins the text.
        languages: by name, such as "en"; empty: the model knows one language alone.
        tasks: "transcribe" and "translate"; empty: it only transcribes.
        forced: what follows the start of a model without languages.
        no_timestamps: ends what the decoder begins with; None: nothing does.
        previous: begins the text that comes before; None: the model takes none.
        previous_max: most tokens of that text.
        chunk_s: how much the model hears at once, seconds.
        control: no text: the tokens that were added to the model's vocabulary, and those of times.
    """

    start: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    forced: tuple[int, ...]
    no_timestamps: int | None
    previous: int | None
    previous_max: int
    chunk_s: float
    control: frozenset[int]

    def begin(
        self, language: str, *, translate: bool, before: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """The decoder's prompt, and what follows the language in the answer where the model is to find it.

        Args:
            language: empty: not known.
            before: the tokens of the text that comes before; of many the last ones are taken.
        """
        prompt = [self.previous, *before[-self.previous_max :]] if before and self.previous else []
        prompt.append(self.start)
        last = [] if self.no_timestamps is None else [self.no_timestamps]
        if not self.languages:
            forced = [token for token in self.forced if token not in last]
            return [*prompt, *forced, *last], []
        task = self.tasks.get("translate" if translate else "transcribe")
        rest = [*([] if task is None else [task]), *last]
        if language:
            return [*prompt, self.languages[language], *rest], []
        return prompt, rest

    def language_of(self, token_ids: Sequence[int]) -> str:
        """The language that an answer begins with; empty: none."""
        names = {token: name for name, token in self.languages.items()}
        return names.get(token_ids[0], "") if token_ids else ""


def speech_tokens(
    config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Tokenizer
) -> SpeechTokens:
    """Those of a folder's config.json, generation_config.json and tokenizer."""
    languages = generation.get("lang_to_id") or {}
    no_timestamps = generation.get("no_timestamps_token_id")
    size = int(config.get("vocab_size") or 0)
    # Those of times are all that lie behind; not every tokenizer lists them.
    times = range(1 + (no_timestamps or size), size)
    forced = generation.get("forced_decoder_ids") or config.get("forced_decoder_ids") or ()
    return SpeechTokens(
        start=generation.get("decoder_start_token_id", config.get("decoder_start_token_id", 50257)),
        languages={name.strip("<|>"): token for name, token in languages.items()},
        tasks=generation.get("task_to_id") or {},
        forced=tuple(token for _, token in forced if token is not None),
        no_timestamps=no_timestamps,
        previous=generation.get("prev_sot_token_id") or tokenizer.token_to_id(_PREVIOUS),
        previous_max=int(config.get("max_target_positions") or 448) // 2 - 1,
        chunk_s=chunk_s(config),
        control=frozenset((*tokenizer.get_added_tokens_decoder(), *times)),
    )
