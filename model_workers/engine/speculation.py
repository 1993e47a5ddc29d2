"""Speculative decoding: a small model drafts tokens in a cache of its own, the large one verifies them in one pass.

Exactness. The large model computes the last token of a sequence and the drafted ones in one chunk. At each position the
sampler draws from the large model's logits with the random number of (seed, index), as always. A drafted token is
accepted if it is the one that is drawn; the first that is not is replaced by the drawn one, and the rest is dropped. So
every token is the one that an engine without drafts would draw. The small model draws with the same random numbers, so
that equal distributions give equal tokens.

Cache. Both caches have the same number of blocks and use the same block tables. The small model has no prefix cache: it
computes every token of a sequence, a shared block with the same values again.

Decision. A step with drafts takes longer and gives more tokens than one without. Its gain is the time of a token
without drafts, divided by that with drafts. Both are means of the recent past, for 1, 2, 3 to 4, 5 to 8, ... sequences.
"""

import logging
from collections import abc, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from model_workers.engine.paged_model import PagedModel, SequenceChunk
from model_workers.engine.protocol import Sampling
from model_workers.engine.sampling.sampler import DrawRequest, Sampler
from model_workers.engine.sampling.state import SamplingState
from model_workers.engine.sequences import Sequence

logger = logging.getLogger(__name__)

SKIPPED: Final = 2
"""First measurements of a kind that do not count: libraries initialize for new shapes."""
SAMPLES: Final = 8
"""Measurements of a kind before they are used."""
REFRESH_STEPS: Final = 64
"""If drafting pays, one step of this many goes without, so that the comparison stays true."""
PAUSE_STEPS: Final = 256
"""If drafting does not pay, steps until it is tried again; doubled after every attempt that did not pay."""
PAUSE_STEPS_MAX: Final = 16384
"""Upper bound of the pause between attempts, in steps."""
GAIN_MIN: Final = 1.05
"""Minimum gain for drafting: measurements are noisy, and switching costs time."""
_WEIGHT: Final = 1 / 16
"""Weight of the newest measurement in a mean."""


@dataclass
class RecentMean:
    """A mean of recent measurements."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Add a measurement."""
        self.count += 1
        counted = self.count - SKIPPED
        if counted > 0:
            self.value += (value - self.value) * max(1 / counted, _WEIGHT)

    @property
    def is_known(self) -> bool:
        """Whether there were enough measurements."""
        return self.count >= SKIPPED + SAMPLES


@dataclass
class _TokenTimes:
    """Seconds a token in steps of about this many sequences, without drafts and with."""

    plain: RecentMean = field(default_factory=RecentMean)
    drafted: RecentMean = field(default_factory=RecentMean)
    steps: int = 0
    pause: int = PAUSE_STEPS // 2
    tried_at: int = 0

    @property
    def gain(self) -> float:
        if not self.plain.is_known or not self.drafted.is_known:
            return 0.0
        return self.plain.value / max(self.drafted.value, 1e-9)


class SpeculationController:
    """Decides before every step whether to draft; gets the duration of every step."""

    def __init__(self) -> None:
        self._times: defaultdict[int, _TokenTimes] = defaultdict(_TokenTimes)

    def should_draft(self, sequences: int) -> bool:
        """Return whether the next step of `sequences` sequences should draft; call it once per step."""
        times = self._of(sequences)
        times.steps += 1
        if not times.plain.is_known:
            return False
        if not times.drafted.is_known:
            return True
        if times.gain > GAIN_MIN:
            return times.steps % REFRESH_STEPS != 0
        if times.steps - times.tried_at >= times.pause:
            times.drafted = RecentMean()
            return True
        return False

    def add_plain(self, sequences: int, seconds: float) -> None:
        """Add a step without drafts."""
        self._of(sequences).plain.add(seconds / sequences)

    def add_drafted(
        self, sequences: int, tokens: int, seconds: float, *, catching_up: bool = False
    ) -> None:
        """Add a step with drafts that gave `tokens`.

        - `catching_up`: Whether the small model had prompts to compute. An attempt does not count such steps: at its
          start all sequences need them, later they are part of the cost of every new sequence.
        """
        times = self._of(sequences)
        was_known = times.drafted.is_known
        if catching_up and not was_known:
            return
        times.drafted.add(seconds / tokens)
        if times.drafted.is_known and not was_known:
            # The attempt is over.
            pays = times.gain > GAIN_MIN
            times.pause = PAUSE_STEPS if pays else min(2 * times.pause, PAUSE_STEPS_MAX)
            times.tried_at = times.steps
            logger.info(
                "drafting at %d sequences has a gain of %.2f: %s",
                sequences,
                times.gain,
                "it goes on" if pays else f"below {GAIN_MIN}, so it pauses",
            )

    def gain(self, sequences: int) -> float:
        """Return tokens per second with drafts relative to those without; 0: not known."""
        return self._of(sequences).gain

    def _of(self, sequences: int) -> _TokenTimes:
        return self._times[(sequences - 1).bit_length()]


@dataclass
class SequenceDraft:
    """The draft of one sequence in a step.

    Attributes:
        limit: Maximum number of drafted tokens.
    """

    sequence: Sequence
    limit: int
    sampling: SamplingState
    tokens: list[int] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Number of tokens that the small model has not computed yet."""
        return len(self.sequence.tokens) + len(self.tokens) - self.sequence.drafted

    def chunk(self, tokens_max: int) -> SequenceChunk:
        """Return what the small model computes next, at most `tokens_max` tokens."""
        sequence = self.sequence
        count = min(self.missing, tokens_max)
        logits_count = 1 if count == self.missing else 0
        missing = (
            sequence.tokens[sequence.drafted :]
            + self.tokens[max(0, sequence.drafted - len(sequence.tokens)) :]
        )
        return SequenceChunk(missing[:count], sequence.drafted, sequence.table.blocks, logits_count)


class Speculator:
    """Owns the small model. Not thread-safe."""

    def __init__(
        self,
        model: PagedModel,
        sampler: Sampler,
        *,
        vocab_size: int,
        draft_tokens: int,
        catch_up_tokens: int,
        clock: Callable[[], float],
        controller: SpeculationController | None = None,
    ) -> None:
        """Create a speculator that drafts up to `draft_tokens` per step.

        - `vocab_size`: Vocabulary of the large model; the two may differ in tokens that no tokenizer knows.
        - `catch_up_tokens`: Maximum number of prompt tokens that the small model computes in a step.
        - `clock`: Returns monotonic seconds.
        - `controller`: Decides when to draft.
        """
        self.controller = controller or SpeculationController()
        self.drafted = self.accepted = 0
        self._model = model
        self._sampler = sampler
        self._vocab_size = min(vocab_size, model.vocab_size)
        self._draft_tokens = draft_tokens
        self._catch_up_tokens = catch_up_tokens
        self._clock = clock
        self._broken = False
        self._budget = 0
        self._began = 0.0
        self._caught_up = True

    def draft(
        self, sequences: abc.Sequence[Sequence], widen: Callable[[Sequence, int], bool]
    ) -> dict[Sequence, list[int]]:
        """Return drafted next tokens of decoding sequences; none where drafting does not pay.

        - `widen`: Extends the table of a sequence by this many tokens, or returns False.
        """
        self._began = self._clock()
        self._caught_up = True
        self._budget = self._catch_up_tokens
        if self._broken or not sequences or not self.controller.should_draft(len(sequences)):
            return {}
        drafts = [
            draft for sequence in sequences if (draft := self._open(sequence, widen)) is not None
        ]
        try:
            for _ in range(self._draft_tokens):
                self._extend([draft for draft in drafts if len(draft.tokens) < draft.limit])
        except Exception:
            # Drafts are optional: the engine continues without them.
            logger.exception("drafting failed and is switched off")
            self._broken = True
            return {}
        return {draft.sequence: draft.tokens for draft in drafts if draft.tokens}

    def measure(
        self, sequences: abc.Sequence[Sequence], drafts: dict[Sequence, list[int]], tokens: int
    ) -> None:
        """Measure the step of the last `draft`, in which its sequences alone were computed and drew `tokens`."""
        seconds = self._clock() - self._began
        if not drafts:
            self.controller.add_plain(len(sequences), seconds)
        else:
            self.controller.add_drafted(
                len(sequences), tokens, seconds, catching_up=not self._caught_up
            )

    def accept(self, sequence: Sequence, drafted: int, drawn: int) -> None:
        """Record how many tokens a sequence has drawn; drafted ones beyond that are dropped."""
        if drafted:
            self.drafted += drafted
            self.accepted += drawn - 1
        sequence.drafted = min(sequence.drafted, len(sequence.tokens) - 1)

    def clear(self, blocks: abc.Sequence[int]) -> None:
        """Clear blocks whose content is not trusted."""
        self._model.clear_blocks(blocks)

    def _open(
        self, sequence: Sequence, widen: Callable[[Sequence, int], bool]
    ) -> SequenceDraft | None:
        limit = min(self._draft_tokens, sequence.room - 1)
        if limit < 1 or len(sequence.tokens) + limit > self._model.context_tokens:
            return None
        if max(sequence.tokens[sequence.drafted :]) >= self._vocab_size or not widen(
            sequence, limit
        ):
            return None
        produced = tuple(sequence.tokens[len(sequence.spec.prompt) :])
        spec = replace(sequence.spec, produced=produced, sampling=_plain(sequence.spec.sampling))
        return SequenceDraft(sequence, limit, SamplingState(spec, None))

    def _extend(self, drafts: abc.Sequence[SequenceDraft]) -> None:
        """Draft one more token for each sequence that the small model has caught up with."""
        work = [(draft, chunk) for draft in drafts if (chunk := self._chunk(draft)) is not None]
        if not work:
            return
        logits = self._model.forward([chunk for _, chunk in work])
        drawing = [draft for draft, chunk in work if chunk.logits]
        if not drawing:
            return
        logits = logits[:, : self._vocab_size]
        drawn = self._sampler.draw(logits, [DrawRequest(draft.sampling) for draft in drawing])
        # Each drafted token extends the draft, until it is as long as it may be.
        for draft, token in zip(drawing, drawn, strict=True):
            draft.tokens += token.token_ids
            if token.error or token.token_ids[-1] in draft.sampling.stop_token_ids:
                draft.limit = len(draft.tokens)

    def _chunk(self, draft: SequenceDraft) -> SequenceChunk | None:
        """Return what the small model computes next; None if the sequence must catch up and the budget is used."""
        short = self._draft_tokens + 1
        if draft.missing > short:
            self._caught_up = False
            if self._budget <= 0:
                return None
        chunk = draft.chunk(max(self._budget, short))
        if len(chunk.tokens) > short:
            self._budget -= len(chunk.tokens)
        draft.sequence.drafted = chunk.start + len(chunk.tokens)
        return chunk


def _plain(sampling: Sampling) -> Sampling:
    """Return sampling parameters for drafts: without penalties and constraints, which count accepted tokens alone."""
    return replace(
        sampling,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logprobs=False,
        top_logprobs=0,
        json_schema=None,
        regex=None,
        grammar=None,
    )
