"""Drafts tokens for rows that decode, with a small model on a cache of its own.

Exactness. The large model computes the last token of a row and the drafted ones in one chunk, and the sampler draws at
each place from the large model's logits with the random number of (seed, index), as it always does. A drafted token is
accepted when it is the one that is drawn; the first that is not is replaced by it, and what follows is dropped. So
every token is the one that an engine without drafts would have drawn. The small model draws its guesses with the same
random numbers: then equal distributions give equal tokens.

The cache of the small model has as many blocks as that of the large one, and both go by the same block tables. A block
that is shared may be unknown to the small model, or be about to change under it: that spoils guesses, never answers.
`Speculator` remembers by hash what the small model has in a block, and has it compute what is missing.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from model_workers.engine.batch import Chunk, PagedModel
from model_workers.engine.protocol import Sampling
from model_workers.engine.rows import Row
from model_workers.engine.sampling.row import RowDraws
from model_workers.engine.sampling.sampler import Ask, Sampler
from model_workers.engine.speculation.payoff import Payoff

log = logging.getLogger(__name__)


@dataclass
class Draft:
    """What is drafted for one row in a step.

    Attributes:
        limit: most tokens to draft.
    """

    row: Row
    limit: int
    draws: RowDraws
    tokens: list[int] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Tokens that the small model has not computed yet."""
        return len(self.row.tokens) + len(self.tokens) - self.row.drafted

    def chunk(self, tokens_max: int) -> Chunk:
        """What the small model has to compute next, at most ``tokens_max`` of it."""
        row = self.row
        count = min(self.missing, tokens_max)
        wanted = 1 if count == self.missing else 0
        missing = row.tokens[row.drafted :] + self.tokens[max(0, row.drafted - len(row.tokens)) :]
        return Chunk(missing[:count], row.drafted, row.table.blocks, wanted)


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
        payoff: Payoff | None = None,
    ) -> None:
        """Makes one that drafts up to ``draft_tokens`` a step.

        Args:
            vocab_size: of the large model; the two may differ in tokens that no tokenizer knows.
            catch_up_tokens: most tokens of prompts that the small model computes in a step.
            clock: monotonic seconds.
            payoff: decides when to draft.
        """
        self.payoff = payoff or Payoff()
        self._model = model
        self._sampler = sampler
        self._vocab_size = min(vocab_size, model.vocab_size)
        self._draft_tokens = draft_tokens
        self._catch_up_tokens = catch_up_tokens
        self._clock = clock
        self._content: dict[int, bytes] = {}
        self._broken = False
        self._budget = 0
        self._began = 0.0
        self._caught_up = True

    def draft(self, rows: Sequence[Row], widen: Callable[[Row, int], bool]) -> dict[Row, list[int]]:
        """Tokens that may come next in rows that decode; nothing where it does not pay.

        Args:
            widen: makes room for so many tokens behind those of a row, or returns False.
        """
        self._began = self._clock()
        self._caught_up = True
        self._budget = self._catch_up_tokens
        if self._broken or not rows or not self.payoff.wants(len(rows)):
            return {}
        drafts = [draft for row in rows if (draft := self._opened(row, widen)) is not None]
        try:
            for _ in range(self._draft_tokens):
                self._extend([draft for draft in drafts if len(draft.tokens) < draft.limit])
        except Exception:
            # Guesses are a bonus: without them the engine goes on as if there had never been any.
            log.exception("drafting failed, and stays off")
            self._broken = True
            return {}
        return {draft.row: draft.tokens for draft in drafts if draft.tokens}

    def settle(self, rows: Sequence[Row], drafts: dict[Row, list[int]], tokens: int) -> None:
        """The rows of the last `draft` have drawn ``tokens``. To be left out when others were computed in the step."""
        seconds = self._clock() - self._began
        if not drafts:
            self.payoff.plain(len(rows), seconds)
        elif self.payoff.drafted(len(rows), tokens, seconds, catching_up=not self._caught_up):
            log.info(
                "drafting gives %.2f tokens per row and step, at %d rows a gain of %.2f",
                self.payoff.tokens_per_row,
                len(rows),
                self.payoff.gain(len(rows)),
            )

    def keep(self, row: Row) -> None:
        """A row has drawn: what was drafted beyond that is forgotten."""
        row.drafted = min(row.drafted, len(row.tokens) - 1)
        table = row.table
        full = min(row.drafted // self._model.block_tokens, len(table.hashes))
        for place in reversed(range(min(full, len(table.blocks)))):
            block, digest = table.blocks[place], table.hashes[place]
            if self._content.get(block) == digest:
                break
            self._content[block] = digest

    def clear(self, blocks: Sequence[int]) -> None:
        """Nobody shall meet again what is in ``blocks``."""
        self._forget(blocks)
        self._model.clear_blocks(blocks)

    def _opened(self, row: Row, widen: Callable[[Row, int], bool]) -> Draft | None:
        limit = min(self._draft_tokens, row.room - 1)
        if limit < 1 or len(row.tokens) + limit > self._model.context_tokens:
            return None
        if max(row.tokens[row.drafted :]) >= self._vocab_size or not widen(row, limit):
            return None
        if row.drafted == 0:
            row.drafted = self._known_tokens(row)
        produced = tuple(row.tokens[len(row.spec.prompt) :])
        spec = replace(row.spec, produced=produced, sampling=_plain(row.spec.sampling))
        return Draft(row, limit, RowDraws(spec, None))

    def _known_tokens(self, row: Row) -> int:
        """Tokens at the front that the small model has in the blocks of a row that has just joined."""
        known = 0
        for block, digest in zip(row.table.blocks, row.table.hashes, strict=False):
            if self._content.get(block) != digest:
                break
            known += self._model.block_tokens
        return min(known, len(row.tokens) - 1)

    def _extend(self, drafts: Sequence[Draft]) -> None:
        """One more token for each draft whose row the small model has caught up with."""
        work = [(draft, chunk) for draft in drafts if (chunk := self._chunk(draft)) is not None]
        if not work:
            return
        logits = self._model.forward([chunk for _, chunk in work])
        drawing = [draft for draft, chunk in work if chunk.logits]
        if not drawing:
            return
        logits = logits[:, : self._vocab_size]
        drawn = self._sampler.draw(logits, [Ask(draft.draws) for draft in drawing])
        for draft, found in zip(drawing, drawn, strict=True):
            draft.tokens += found.token_ids
            if found.error or found.token_ids[-1] in draft.draws.stop_token_ids:
                draft.limit = len(draft.tokens)

    def _chunk(self, draft: Draft) -> Chunk | None:
        """What the small model computes next; None when the row has to catch up, and others do that already."""
        few = self._draft_tokens + 1
        if draft.missing > few:
            self._caught_up = False
            if self._budget <= 0:
                return None
        chunk = draft.chunk(max(self._budget, few))
        if len(chunk.tokens) > few:
            self._budget -= len(chunk.tokens)
        size = self._model.block_tokens
        end = chunk.start + len(chunk.tokens)
        self._forget(chunk.blocks[chunk.start // size : -(-end // size)])
        draft.row.drafted = end
        return chunk

    def _forget(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._content.pop(block, None)


def _plain(sampling: Sampling) -> Sampling:
    """What guesses are drawn with: without penalties and constraints, which know only the true answer."""
    return replace(
        sampling,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logprobs=False,
        top_logprobs=0,
        json_schema=None,
        regex=None,
    )
