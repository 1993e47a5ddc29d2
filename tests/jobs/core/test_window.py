from hypothesis import given
from hypothesis import strategies as st

from jobs.core.pace import CostBudget, RateLimit
from jobs.core.retry import WAIT_S_MAX, FailureKind, ItemRetryPolicy
from jobs.core.window import BLOCK, SPAN_MAX, ItemWindow
from jobs.items import Item
from sluice.v1.inference_pb2 import GenerateRequest


def entry(position: int, prompt: str = "p", input_hash: bytes = b"") -> Item:
    request = GenerateRequest(prompt=prompt)
    name = f"i{position}"
    return Item(name, position + 1, request, "", position, position, input_hash)


def window(concurrency: int = 8, retries: int = 2) -> ItemWindow:
    return ItemWindow(
        concurrency, ItemRetryPolicy(retries=retries), RateLimit(0, 0.0), RateLimit(0, 0.0)
    )


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([*"aaaprn"])), max_size=60),
    st.integers(1, 9),
    st.integers(0, 3),
)
def test_every_item_ends_once_and_never_more_are_in_flight(
    items: list[tuple[int, str]], concurrency: int, retries: int
) -> None:
    """Each item is answered (a), fails for good (p), passingly (r), or finds no room twice (n), then is answered."""
    one = window(concurrency, retries)
    one.add([entry(position, input_hash=bytes([h]) * h) for position, (h, _) in enumerate(items)])
    ended: list[int] = []
    now, sent = 0.0, 0
    while len(one):
        found = one.next_item(now)
        if found is None:
            wait_s = one.wait_s(now)
            assert wait_s is not None, "nothing is in flight, so something is due"
            now += wait_s
            continue
        sent += 1
        assert one.in_flight <= concurrency
        plan = items[found.position][1]
        if plan == "n" and found.refusals < 2:
            assert not one.on_failure(found, FailureKind.NO_CAPACITY, 0.0, now, 0.5)
        elif plan in "pr":
            kind = FailureKind.PERMANENT if plan == "p" else FailureKind.TRANSIENT
            if one.on_failure(found, kind, 0.0, now, 0.5):
                assert found.tries == (1 if plan == "p" else retries + 1)
                ended += [found.position, *(other.position for other in one.on_ended(found))]
        else:
            ended += [found.position, *(other.position for other in one.on_answer(found, 3))]

    assert sorted(ended) == list(range(len(items)))
    assert one.in_flight == 0


def test_a_block_is_sent_by_beginning_and_length() -> None:
    first, second = "A" * 64, "B" * 64
    prompts = [first + "long " * 9, "x" * 90, second + "1", first + "2", "y", second + "22"]
    one = window()
    one.add([entry(position, prompt) for position, prompt in enumerate(prompts)])

    sent = [found.request.prompt for _ in prompts if (found := one.next_item(0.0)) is not None]

    assert sent == ["y", "x" * 90, first + "2", first + "long " * 9, second + "1", second + "22"]


def test_window_is_full_by_span_or_waiting_block() -> None:
    one = window()
    assert one.has_room(0, 0)
    assert not one.has_room(0, SPAN_MAX)
    one.add([entry(position) for position in range(BLOCK)])

    assert not one.has_room(0, BLOCK)


def test_an_item_waits_no_day_where_a_limit_of_a_day_is_spent() -> None:
    one = window()
    one.add([entry(0)])
    found = one.next_item(0.0)
    assert found is not None
    assert not one.on_failure(found, FailureKind.NO_CAPACITY, 80_000.0, 0.0, 0.5)
    assert one.wait_s(0.0) == WAIT_S_MAX


def test_a_returned_item_is_sent_again_without_counting() -> None:
    one = window()
    one.add([entry(0)])
    found = one.next_item(0.0)
    assert found is not None
    one.on_returned(found, 1.0)

    assert one.wait_s(0.0) == 1.0
    assert one.next_item(1.0) is found
    assert found.tries == 0


def test_tokens_are_set_aside_before_they_are_counted() -> None:
    """1,200 a minute: 20 at once. The first item may take 50, so the second waits until its answer says 4."""
    one = ItemWindow(8, ItemRetryPolicy(), RateLimit(0, 0.0), RateLimit(1200, 0.0))
    one.add([entry(position) for position in range(20)])
    first = one.next_item(0.0)
    assert first is not None
    assert one.next_item(0.0) is None
    one.on_answer(first, 4)
    sent = 0
    while one.next_item(0.0) is not None:
        sent += 1

    assert sent == 4, "16 are left, and each is taken to need as many as the first"


def test_what_was_set_aside_comes_back_with_a_failure() -> None:
    one = ItemWindow(8, ItemRetryPolicy(retries=0), RateLimit(0, 0.0), RateLimit(1200, 0.0))
    one.add([entry(position) for position in range(3)])
    first = one.next_item(0.0)
    assert first is not None
    one.on_failure(first, FailureKind.PERMANENT, 0.0, 0.0, 0.5)
    one.on_ended(first)
    second = one.next_item(0.0)
    assert second is not None
    one.on_returned(second, 0.0)

    assert one.next_item(0.0) is second


def test_a_budget_bounds_what_is_in_flight() -> None:
    budget = CostBudget(10.0)
    one = ItemWindow(8, ItemRetryPolicy(), RateLimit(0, 0.0), RateLimit(0, 0.0), budget)
    one.add([entry(position) for position in range(20)])
    first = one.next_item(0.0)
    assert first is not None
    assert (one.next_item(0.0), one.wait_s(0.0)) == (None, None)
    one.on_answer(first, 1, cost=2.0)
    while one.next_item(0.0) is not None:
        pass

    assert one.in_flight == 4


def test_long_requests_fill_the_flight_by_their_bytes() -> None:
    one = window(concurrency=100)
    one.add([entry(position, "x" * 1_000_000) for position in range(12)])
    while (last := one.next_item(0.0)) is not None:
        sent = last
    assert one.in_flight == 2, "the last one begins below 100 times 16 KiB"
    one.on_returned(sent, 1.0)

    assert one.next_item(0.0) is not None
    assert one.in_flight == 2
