"""Follows one answer: which of its text can still become part of a match."""

from gateway.safety.output.automaton import HIDDEN, NO_MATCH, Automaton, State


class Watch:
    """What is under way and what has matched, by offset in the answer.

    Attributes:
        end: characters followed so far.
        widest: the most characters that any match may have that is under way, or not dealt with.
    """

    def __init__(self, automaton: Automaton, at: int = 0, before: str = "") -> None:
        """Begins at offset ``at``, behind ``before``."""
        self._automaton = automaton
        self._state: State = automaton.begin(before)
        self._starts: list[int] = []
        # Unions of places where findings may be, in order: start, end, the offset from which on it is decided.
        self._claims: list[tuple[int, int, int]] = []
        self.end = at
        self.widest = 0

    def feed(self, text: str) -> None:
        """Follows ``text``."""
        state, starts, at = self._state, self._starts, self.end
        edges = state.edges
        for char in text:
            edge = edges.get(char)
            if edge is None:
                edge = self._automaton.edge(state, char)
            state, kept, claim, growth, after = edge
            edges = state.edges
            if claim != NO_MATCH:
                if claim == HIDDEN:
                    self._stretch(at)
                else:
                    start = starts[claim] if claim < len(starts) else at
                    self._claim(start, at + 1 + growth, after)
            if kept is not None:
                starts.append(at)
                starts = [starts[index] for index in kept]
                busy = starts or self._claims
                self.widest = max(self.widest, state.reach) if busy else 0
            at += 1
        self._state, self._starts, self.end = state, starts, at

    @property
    def open_from(self) -> int:
        """Where the oldest match under way begins; the end when there is none."""
        return self._starts[0] if self._starts else self.end

    @property
    def free_to(self) -> int:
        """Up to here the text is decided: no match can come that holds a character before it and one behind it."""
        free = self.open_from
        for start, end, decided in self._claims:
            if start < free and (free < end or self.end < decided):
                return start
        return free

    def claims_before(self, offset: int) -> bool:
        """Whether anything has matched before ``offset``."""
        return bool(self._claims) and self._claims[0][0] < offset

    def forget_before(self, offset: int) -> None:
        """The text before ``offset`` has been dealt with."""
        if self._claims:
            self._claims = [claim for claim in self._claims if claim[1] > offset]

    def _claim(self, start: int, end: int, after: int) -> None:
        decided = end + after
        while self._claims and start < self._claims[-1][1]:
            first, last, later = self._claims.pop()
            start, end, decided = min(first, start), max(last, end), max(later, decided)
        # Decided no sooner than those before it, so that the undecided ones are the last.
        later = self._claims[-1][2] if self._claims else 0
        self._claims.append((start, end, max(later, decided)))

    def _stretch(self, at: int) -> None:
        """Lengthens what is still to come by an invisible character at offset ``at``."""
        for index in range(len(self._claims) - 1, -1, -1):
            start, end, decided = self._claims[index]
            if decided <= at:
                return
            self._claims[index] = start, end + (end > at), decided + 1
