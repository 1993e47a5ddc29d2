import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from model_workers.engine.blocks import BlockManager
from model_workers.engine.pace import BULK_RANK
from model_workers.engine.protocol import (
    Sampling,
    SequenceEnd,
    SequenceSpec,
    is_retryable,
)
from model_workers.engine.scheduler import WITHHELD_STEPS, Scheduler
from model_workers.engine.sequences import Sequence, SequenceLimits, SequenceState
from sluice.errors import InvalidRequest, Overloaded, PromptTooLong
from sluice.internal.v1 import worker_pb2
from tests.support.sequences import sequence_spec

SIZE = 4


def scheduler(
    num_blocks: int = 64,
    *,
    slots: int = 4,
    max_waiting: int = 50,
    context: int = 32,
    prefill: int = 16,
    sequences_cost_time: bool = True,
) -> Scheduler:
    limits = SequenceLimits(slots, max_waiting, context, prefill)
    return Scheduler(
        BlockManager(num_blocks, SIZE), limits, sequences_cost_time=sequences_cost_time
    )


def step(core: Scheduler, token: int = 1, bulk_tokens: int = 0) -> dict[str, int]:
    """Computes what is planned; sequences whose tokens are all computed draw ``token``."""
    planned = core.schedule(bulk_tokens)
    for sequence, count in planned:
        if count == sequence.pending:
            end = sequence.take((token,)).end
            core.advance(sequence, count)
            if end is not None:
                core.finish(sequence)
        else:
            core.advance(sequence, count)
    return {sequence.spec.request_id: count for sequence, count in planned}


def long(name: str, prompt: int = 1, tokens: int = 20, rank: int = 0) -> SequenceSpec:
    start = ord(name[0])
    return sequence_spec(name, range(start, start + prompt), Sampling(tokens), rank=rank)


def test_step_with_bulk_prompts_keeps_their_token_limit() -> None:
    core = scheduler(slots=6)
    core.add(long("a", 4, rank=2))
    core.add(long("b", 12, rank=2))
    assert step(core, bulk_tokens=6) == {"a": 4, "b": 2}
    assert step(core, bulk_tokens=6) == {"a": 1, "b": 6}
    core.add(long("standard", 9, rank=1))
    assert step(core, bulk_tokens=6) == {"a": 1, "standard": 9}
    core.add(long("c", 9, rank=2))
    assert step(core) == {"a": 1, "b": 4, "c": 9, "standard": 1}


def test_a_more_urgent_prompt_is_computed_without_limited_ones() -> None:
    core = scheduler(slots=6)
    core.add(long("b", 12, rank=2))
    assert step(core, bulk_tokens=6) == {"b": 6}
    core.add(long("a", 3))
    assert step(core, bulk_tokens=6) == {"a": 3}
    assert step(core, bulk_tokens=6) == {"a": 1, "b": 6}


@pytest.mark.parametrize("sequences_cost_time", [True, False])
def test_bulk_majority_does_not_decode_beside_urgent_prompts(
    sequences_cost_time: bool,
) -> None:
    core = scheduler(slots=6, sequences_cost_time=sequences_cost_time)
    for name in "ab":
        core.add(long(name, rank=2))
    decodes = {"a": 1, "b": 1}
    assert step(core, bulk_tokens=6) == step(core, bulk_tokens=6) == decodes
    core.add(long("urgent", 3))
    assert step(core, bulk_tokens=6) == {**({} if sequences_cost_time else decodes), "urgent": 3}
    assert step(core, bulk_tokens=6) == {**decodes, "urgent": 1}
    core.add(long("v", 3))
    assert step(core, bulk_tokens=6) == {**decodes, "urgent": 1, "v": 3}, "half of its sequences"
    core.add(long("c", rank=2))
    assert step(core, bulk_tokens=6) == {**decodes, "urgent": 1, "v": 1, "c": 1}
    core.add(long("w", 3))
    assert step(core) == {**decodes, "urgent": 1, "v": 1, "c": 1, "w": 3}, "nothing is limited"


def test_bulk_decodes_in_the_fifth_step_with_urgent_prompts() -> None:
    core = scheduler(slots=40, max_waiting=0)
    for name in "abcdefghijklm":
        core.add(long(name, rank=2))
    step(core, bulk_tokens=16)
    planned = []
    for name in "ABCDEF":
        core.add(long(name, 2, tokens=1))
        planned.append(len(step(core, bulk_tokens=6)) - 1)
    assert planned == [0] * WITHHELD_STEPS + [13, 0]


def test_limited_prompts_do_not_wait_for_urgent_ones_for_ever() -> None:
    core = scheduler(slots=40, max_waiting=0)
    core.add(long("bulk", 20, rank=2))
    assert step(core, bulk_tokens=6) == {"bulk": 6}
    planned = []
    for name in "abcdefghij":
        core.add(long(name, 2))
        planned.append(step(core, bulk_tokens=6).get("bulk", 0))
    assert planned == [0] * WITHHELD_STEPS + [4] + [0] * WITHHELD_STEPS + [4]


def test_rows_over_slots_and_waiting_places_are_refused() -> None:
    core = scheduler(slots=2, max_waiting=1)
    for name in "abc":
        core.add(sequence_spec(name, [1]))
    with pytest.raises(Overloaded) as refused:
        core.add(sequence_spec("d", [1]))
    assert is_retryable(refused.value)
    core.add(sequence_spec("c", [1], attempt=1))  # one that is replaced makes its own room
    assert list(step(core)) == ["a", "b"]
    assert (core.load(0).running, core.load(0).waiting) == (2, 1)


def test_the_prompt_must_leave_room_for_a_token() -> None:
    core = scheduler(context=8)
    with pytest.raises(PromptTooLong, match="8 tokens") as refused:
        core.add(sequence_spec("r", range(8)))
    assert not is_retryable(refused.value)
    core.add(sequence_spec("r", range(7)))


@pytest.mark.parametrize("running", [True, False])
def test_only_a_higher_attempt_replaces(running: bool) -> None:
    core = scheduler()
    old = core.add(sequence_spec("r", [1], attempt=3))
    if running:
        step(core)
    for attempt in (2, 3):
        with pytest.raises(InvalidRequest):
            core.add(sequence_spec("r", [1], attempt=attempt))
    new = core.add(sequence_spec("r", [2], attempt=4))
    assert (old.state, core.sweep(0.0)) == (SequenceState.ENDED, [])
    core.cancel(["r", "unknown"])
    assert core.sweep(0.0) == [(new, SequenceEnd.CANCELLED)]
    assert not core.has_sequences()


def test_waiting_rows_end_by_cancel_and_deadline_too() -> None:
    core = scheduler(slots=1)
    for name in "abcd":
        core.add(sequence_spec(name, [ord(name)], deadline=10.0 if name == "c" else None))
    step(core)
    core.cancel(["b"])
    assert [(sequence.spec.request_id, end) for sequence, end in core.sweep(9.0)] == [
        ("b", SequenceEnd.CANCELLED)
    ]
    assert [(sequence.spec.request_id, end) for sequence, end in core.sweep(10.0)] == [
        ("c", SequenceEnd.DEADLINE)
    ]
    assert (core.load(0).running, core.load(0).waiting) == (1, 1)


def test_a_resumed_row_that_lacked_only_its_end_is_swept() -> None:
    core = scheduler()
    sequence = core.add(sequence_spec("r", [1], Sampling(2), produced=[5, 6]))
    assert core.sweep(0.0) == [(sequence, SequenceEnd.LENGTH)]


def test_prompts_are_cut_to_the_budget_beside_rows_that_decode() -> None:
    core = scheduler(prefill=8)
    core.add(long("a"))
    step(core)
    core.add(long("b", prompt=13))
    core.add(long("z", prompt=9))
    assert [step(core) for _ in range(4)] == [
        {"a": 1, "b": 8},
        {"a": 1, "b": 5, "z": 3},
        {"a": 1, "b": 1, "z": 6},
        {"a": 1, "b": 1, "z": 1},
    ]


def test_an_urgent_prompt_goes_before_one_that_has_begun() -> None:
    core = scheduler(prefill=8)
    core.add(long("bulk", prompt=20, rank=2))
    assert step(core) == {"bulk": 8}
    core.add(long("now", prompt=6, rank=0))
    assert step(core) == {"now": 6, "bulk": 2}


def test_an_urgent_row_takes_the_slot_of_the_least_urgent_one() -> None:
    core = scheduler(slots=2)
    for name, rank in (("a", 1), ("b", 2)):
        core.add(long(name, rank=rank))
    step(core)
    core.add(long("now", rank=0))
    assert step(core) == {"a": 1, "now": 1}
    assert core.preemptions == 1
    core.cancel(["a"])
    core.sweep(0.0)
    assert step(core) == {"now": 1, "b": 2}, "its token is kept, and computed again with the prompt"


def test_queue_is_ordered_by_urgency_then_arrival() -> None:
    core = scheduler(slots=1)
    for name, rank in (("a", 2), ("b", 2), ("c", 0), ("d", 1), ("e", 0)):
        core.add(long(name, rank=rank, tokens=1))
    assert [list(step(core)) for _ in range(5)] == [["c"], ["e"], ["d"], ["a"], ["b"]]


def test_rows_of_the_same_rank_do_not_give_way_to_one_that_waits() -> None:
    core = scheduler(slots=1)
    core.add(long("a", rank=1))
    step(core)
    core.add(long("b", rank=1))
    assert step(core) == {"a": 1}
    assert core.preemptions == 0


def test_an_urgent_row_that_would_not_fit_anyway_preempts_nobody() -> None:
    core = scheduler(10)
    core.add(long("a", prompt=24, rank=0))
    core.add(long("b", prompt=4, rank=2))
    for _ in range(3):
        step(core)
    core.add(long("now", prompt=20, rank=0))
    assert set(step(core)) == {"a", "b"}
    assert core.preemptions == 0


def test_out_of_blocks_the_youngest_goes_and_comes_back_first() -> None:
    core = scheduler(8, context=32)
    core.add(long("a", prompt=11, tokens=20))
    core.add(long("z", prompt=7, tokens=20))
    seen = [set(step(core)) for _ in range(13)]
    assert seen[-1] == {"a"}
    core.add(long("q", prompt=1))
    names = [name for _ in range(60) for name in step(core)]
    assert core.preemptions > 0
    assert names.index("z") < names.index("q")
    assert not core.has_sequences()


def test_a_joining_row_leaves_a_block_for_every_running_one() -> None:
    core = scheduler(8)
    core.add(long("a", prompt=8))
    core.add(long("k", prompt=21))
    assert list(step(core)) == ["a"], "6 blocks are free, but not 1 more"


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: bounds hold, every sequence ends once, the most urgent one moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.core = scheduler(9, slots=3, max_waiting=3, prefill=6)
        self.now = 0.0
        self.accepted = self.ended = 0

    @rule(
        name=st.sampled_from("abcdefg"),
        attempt=st.integers(0, 3),
        prompt=st.integers(1, 30),
        rank=st.integers(0, 2),
        wait=st.integers(1, 30),
    )
    def add(self, name: str, attempt: int, prompt: int, rank: int, wait: int) -> None:
        before = self.core.load(0)
        spec = sequence_spec(
            name,
            range(prompt),
            attempt=attempt,
            deadline=self.now + wait,
            rank=rank,
        )
        try:
            self.core.add(spec)
        except (InvalidRequest, Overloaded):
            assert self.core.load(0) == before
            return
        after = self.core.load(0)
        self.accepted += 1
        self.ended += before.running + before.waiting + 1 - after.running - after.waiting

    @rule(name=st.sampled_from("abcdefg"))
    def cancel(self, name: str) -> None:
        self.core.cancel([name])

    @rule(passed=st.floats(0, 3))
    def sweep(self, passed: float) -> None:
        self.now += passed
        swept = self.core.sweep(self.now)
        self.ended += len(swept)
        assert all(sequence.end_now(self.now) is not None for sequence, _ in swept)
        assert all(sequence.end_now(self.now) is None for sequence in self.sequences())

    @rule(fails=st.booleans(), limit=st.sampled_from([0, 0, 1, 4, 9]))
    def step(self, fails: bool, limit: int) -> None:
        sequences = self.sequences()
        urgent = min(sequences, key=lambda sequence: sequence.urgency, default=None)
        runs = urgent is not None and urgent.state is SequenceState.RUNNING
        before = len(sequences)
        planned = dict(self.core.schedule(limit))
        assert bool(planned) == bool(sequences)
        prompts = {sequence: n for sequence, n in planned.items() if sequence.pending > 1}
        bulk = any(sequence.spec.rank == BULK_RANK for sequence in prompts)
        assert sum(prompts.values()) <= (min(6, limit) if bulk and limit else 6)
        assert all(sequence.state is SequenceState.RUNNING for sequence in planned)
        if runs:
            assert urgent in planned, "the most urgent sequence stands still"
        for sequence, count in planned.items():
            self.compute(sequence, count, fails)
            fails = False
        self.ended += before - len(self.sequences())

    def compute(self, sequence: Sequence, count: int, fails: bool) -> None:
        assert sequence.computed + count <= len(sequence.table.blocks) * SIZE
        if fails:
            self.core.discard(sequence)
            return
        end = sequence.take((1,)).end if count == sequence.pending else None
        self.core.advance(sequence, count)
        if end is not None:
            self.core.finish(sequence)

    def sequences(self) -> list[Sequence]:
        return self.core.sequences()

    @invariant()
    def bounds(self) -> None:
        load = self.core.load(0)
        sequences = self.sequences()
        states = [sequence.state for sequence in sequences]
        assert load.running == states.count(SequenceState.RUNNING) <= load.slots
        assert load.waiting == len(sequences) - load.running
        assert load.running + load.waiting == self.accepted - self.ended <= 6
        held = {block for sequence in sequences for block in sequence.table.blocks}
        assert load.free_blocks == load.cache_blocks - len(held)
        waiting = [
            sequence.pending
            for sequence in sequences
            if sequence.state is not SequenceState.RUNNING
        ]
        prompts = [
            sequence.pending
            for sequence in sequences
            if sequence.state is SequenceState.RUNNING and sequence.pending > 1
        ]
        assert load.waiting_tokens == sum(waiting) + sum(prompts)
        assert list(load.classes) == [self.rank_load(rank) for rank in range(3)]

    def rank_load(self, rank: int) -> worker_pb2.ClassLoad:
        sequences = [sequence for sequence in self.sequences() if sequence.spec.rank == rank]
        running = [sequence for sequence in sequences if sequence.state is SequenceState.RUNNING]
        to_compute = [
            sequence.pending
            for sequence in sequences
            if sequence.pending > 1 or sequence.state is not SequenceState.RUNNING
        ]
        return worker_pb2.ClassLoad(
            running=len(running),
            waiting=len(sequences) - len(running),
            running_tokens=sum(len(sequence.tokens) for sequence in running),
            waiting_tokens=sum(to_compute),
        )

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.core.has_sequences():
                break
            self.core.sweep(0.0)
            self.step(False, 0)
        assert not self.core.has_sequences(), "the scheduler is stuck"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=40)
