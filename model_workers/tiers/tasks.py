"""The support tasks: seeded examples of every cell, split so that training and held-out tasks never overlap.

The split depends on the task, not on the seed: the hash of an example's content decides its side, so that no seed can
make a training run see a held-out task.
"""

import json
from collections.abc import Iterator, Mapping
from random import Random
from typing import Final, Literal
from zlib import crc32

from model_workers.tiers import words
from model_workers.tiers.example import CELLS, Cell, Example, Level

# The working is written units first, all at one width: a carry then only ever depends on digits
# already written, and every digit finds its operands at a constant distance.
_WIDTH: Final = 4


def sort_example(rng: Random, level: Level) -> Example:
    """Return a task to sort 3 numbers (easy), 4 to 6 (mid) or 7 to 9 (hard, 2 and 3 digits)."""
    if level == "easy":
        numbers = [_amount(rng, rng.choice((1, 2, 2))) for _ in range(3)]
    elif level == "mid":
        numbers = [_amount(rng, rng.choice((1, 2, 3))) for _ in range(rng.randint(4, 6))]
    else:
        numbers = [_amount(rng, rng.choice((2, 3))) for _ in range(rng.randint(7, 9))]
    prompt = rng.choice(words.PROMPTS["sort"]).format(_join(numbers))
    return Example("sort", level, prompt, _join(sorted(numbers)), _content(numbers), 64)


def total_example(rng: Random, level: Level) -> Example:
    """Return a task to add 2 numbers of 1 or 2 digits (easy), 2 or 3 of 2 or 3 digits (mid), 4 to 6 of 3 (hard)."""
    if level == "easy":
        numbers = [_amount(rng, rng.choice((1, 2, 2))) for _ in range(2)]
    elif level == "mid":
        numbers = [_amount(rng, rng.choice((2, 3))) for _ in range(rng.randint(2, 3))]
    else:
        numbers = [_amount(rng, 3) for _ in range(rng.randint(4, 6))]
    prompt = rng.choice(words.PROMPTS["total"]).format(_join(numbers))
    return Example("total", level, prompt, total_answer(numbers), _content(numbers), 96)


def total_answer(numbers: list[int]) -> str:
    """Return the answer to a sum: the working, amount by amount, and the total."""
    running = numbers[0]
    steps = [_units_first(running)]
    for number in numbers[1:]:
        running += number
        steps.append(f"+{_units_first(number)} ={_units_first(running)}")
    return f"Units first: {' '.join(steps)}\nTotal: {running}"


def _units_first(number: int) -> str:
    return f"{number:0{_WIDTH}d}"[::-1]


def _amount(rng: Random, digits: int) -> int:
    return rng.randint(10 ** (digits - 1), 10**digits - 1)


def _join(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _content(numbers: list[int]) -> str:
    # The order of the numbers is phrasing too: a held-out set of numbers is new in every order.
    return _join(sorted(numbers))


def classify_example(rng: Random) -> Example:
    """Return a task to name the label of a ticket."""
    label = rng.choice(words.LABELS)
    ticket = _ticket(rng, _story(rng, label), rng.choice(words.NAMES))
    prompt = rng.choice(words.PROMPTS["classify"]).format(ticket)
    return Example("classify", "easy", prompt, label, ticket, 8)


def extract_example(rng: Random) -> Example:
    """Return a task to copy order number and amount out of a ticket that may hold other numbers too."""
    order, amount = _code(rng), _price(rng)
    mentions = [
        rng.choice(words.ORDER_MENTIONS).format(order),
        rng.choice(words.AMOUNT_MENTIONS).format(amount),
        *rng.sample(_distractors(rng), rng.randint(0, 2)),
    ]
    if rng.random() < 0.5:
        mentions.append(_with_details(rng, rng.choice(words.COMPLAINTS[rng.choice(words.LABELS)])))
    rng.shuffle(mentions)
    ticket = _ticket(rng, mentions, rng.choice(words.NAMES))
    prompt = rng.choice(words.PROMPTS["extract"]).format(ticket)
    answer = json.dumps({"order": order, "amount": amount})
    return Example("extract", "easy", prompt, answer, ticket, 40)


def reply_example(rng: Random) -> Example:
    """Return a task to answer a ticket: greet by name, name the order, state the policy of its label, sign."""
    label, name, order = rng.choice(words.LABELS), rng.choice(words.NAMES), _code(rng)
    mentions = [*_story(rng, label), rng.choice(words.ORDER_MENTIONS).format(order)]
    rng.shuffle(mentions)
    ticket = _ticket(rng, mentions, name)
    policy = words.POLICIES[label]
    sentences = (rng.choice(words.THANKS).format(order), policy, rng.choice(words.OFFERS))
    body = " ".join(filter(None, sentences))
    answer = f"Dear {name},\n{body}\n{words.SIGNATURE}"
    prompt = rng.choice(words.PROMPTS["reply"]).format(ticket)
    facts = (f"Dear {name},", f"order {order}.", policy, words.SIGNATURE)
    return Example("reply", "easy", prompt, answer, ticket, 112, facts)


def _ticket(rng: Random, sentences: list[str], name: str) -> str:
    opener = rng.choice((*words.OPENERS, ""))
    closer = rng.choice(words.CLOSERS).format(n=name)
    return " ".join(filter(None, (opener, *sentences, closer)))


def _story(rng: Random, label: str) -> list[str]:
    story = [_with_details(rng, rng.choice(words.COMPLAINTS[label]))]
    if rng.random() < 0.5:
        story.append(_with_details(rng, rng.choice(words.ASIDES)))
        rng.shuffle(story)
    return story


def _with_details(rng: Random, sentence: str) -> str:
    """Fill in two products, {p} and {q}, and a number, {d}.

    Draws the same three values for every sentence: one draw more or less changes all examples that follow.
    """
    product, other = rng.sample(words.PRODUCTS, 2)
    return sentence.format(p=product, q=other, d=rng.randint(2, 19))


def _code(rng: Random) -> str:
    return f"{rng.choice('ABCDEFGH')}-{rng.randint(10000, 99999)}"


def _price(rng: Random) -> str:
    return f"{rng.randint(5, 499)}.{rng.randint(0, 99):02d}"


def _distractors(rng: Random) -> list[str]:
    return [
        f"My customer number is {_code(rng)}.",
        f"My phone number is 0{rng.randint(100000, 999999)}.",
        f"I had a voucher of {_price(rng)} euros.",
        f"A friend got it for {_price(rng)} euros elsewhere.",
        f"It was on {rng.randint(1, 28)}.{rng.randint(1, 12)}.2026.",
    ]


Split = Literal["train", "heldout"]
_HELDOUT_ONE_IN: Final = 16


def split_of(content: str) -> Split:
    """Return the side of the split of a task's content."""
    return "heldout" if crc32(content.encode()) % _HELDOUT_ONE_IN == 0 else "train"


def stream(seed: int, mix: Mapping[Cell, float], split: Split = "train") -> Iterator[Example]:
    """Yield examples without end; `mix` weighs the cells."""
    rng = Random(f"{split} {seed}")
    cells, weights = list(mix), list(mix.values())
    while True:
        cell = rng.choices(cells, weights)[0]
        yield _draw(rng, cell, split)


def generate(seed: int, n: int, cell: Cell, split: Split = "train") -> list[Example]:
    """Return `n` examples of one cell."""
    rng = Random(f"{split} {seed} {cell}")
    return [_draw(rng, cell, split) for _ in range(n)]


def heldout(n_per_cell: int, seed: int) -> list[Example]:
    """Return `n_per_cell` held-out examples of every cell, cell after cell."""
    return [e for cell in CELLS for e in generate(seed, n_per_cell, cell, "heldout")]


def _draw(rng: Random, cell: Cell, split: Split) -> Example:
    while True:
        example = _make(rng, cell)
        if split_of(example.content) == split:
            return example


def _make(rng: Random, cell: Cell) -> Example:
    kind, level = cell
    match kind:
        case "classify":
            return classify_example(rng)
        case "extract":
            return extract_example(rng)
        case "reply":
            return reply_example(rng)
        case "sort":
            return sort_example(rng, level)
        case "total":
            return total_example(rng, level)
