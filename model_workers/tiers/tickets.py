"""The text kinds: classify a ticket, extract its order and amount, reply to its author."""

import json
from random import Random
from typing import Final

from model_workers.tiers import words
from model_workers.tiers.example import Example

_CLASSIFY_PHRASES: Final = (
    "Classify this ticket: {}",
    "Which label fits this ticket?\n{}",
    "Label the ticket.\n{}",
    "What is this ticket about? {}",
    "Ticket: {}\nLabel:",
)
_EXTRACT_PHRASES: Final = (
    "Extract the order and the amount: {}",
    "Give order number and amount as JSON.\n{}",
    "Return the order and amount of this ticket as JSON: {}",
    "Ticket: {}\nOrder and amount as JSON:",
)
_REPLY_PHRASES: Final = (
    "Reply to this ticket: {}",
    "Write a polite reply.\n{}",
    "Answer this customer: {}",
    "Draft an answer to the ticket below.\n{}",
)
_ORDER_MENTIONS: Final = (
    "My order is {}.",
    "The order number is {}.",
    "It is about order {}.",
    "This was order {}.",
    "Order: {}.",
)
_AMOUNT_MENTIONS: Final = (
    "I paid {} euros.",
    "The amount was {} euros.",
    "It cost me {} euros.",
    "You charged {} euros.",
)
_THANKS: Final = (
    "Thank you for your message about order {}.",
    "Thank you for writing to us about order {}.",
    "We are sorry about the trouble with order {}.",
)
_OFFERS: Final = (
    "Please write to us again if anything is unclear.",
    "If you need anything else, just answer this message.",
    "",
)


def classify_example(rng: Random) -> Example:
    """Name the label of a ticket."""
    label = rng.choice(words.LABELS)
    ticket = _ticket(rng, _story(rng, label), rng.choice(words.NAMES))
    prompt = rng.choice(_CLASSIFY_PHRASES).format(ticket)
    return Example("classify", "easy", prompt, label, ticket, 8)


def extract_example(rng: Random) -> Example:
    """Copy the order number and the amount out of a ticket that holds other numbers too."""
    order, amount = _code(rng), _price(rng)
    mentions = [
        rng.choice(_ORDER_MENTIONS).format(order),
        rng.choice(_AMOUNT_MENTIONS).format(amount),
        *rng.sample(_distractors(rng), rng.randint(0, 2)),
    ]
    if rng.random() < 0.5:
        mentions.append(_fill(rng, rng.choice(words.COMPLAINTS[rng.choice(words.LABELS)])))
    rng.shuffle(mentions)
    ticket = _ticket(rng, mentions, rng.choice(words.NAMES))
    prompt = rng.choice(_EXTRACT_PHRASES).format(ticket)
    answer = json.dumps({"order": order, "amount": amount})
    return Example("extract", "easy", prompt, answer, ticket, 40)


def reply_example(rng: Random) -> Example:
    """Answer a ticket: greet by name, name the order, state the policy of its label, sign."""
    label, name, order = rng.choice(words.LABELS), rng.choice(words.NAMES), _code(rng)
    mentions = [*_story(rng, label), rng.choice(_ORDER_MENTIONS).format(order)]
    rng.shuffle(mentions)
    ticket = _ticket(rng, mentions, name)
    policy = words.POLICIES[label]
    sentences = (rng.choice(_THANKS).format(order), policy, rng.choice(_OFFERS))
    body = " ".join(filter(None, sentences))
    answer = f"Dear {name},\n{body}\n{words.SIGNATURE}"
    prompt = rng.choice(_REPLY_PHRASES).format(ticket)
    facts = (f"Dear {name},", f"order {order}.", policy, words.SIGNATURE)
    return Example("reply", "easy", prompt, answer, ticket, 112, facts)


def _ticket(rng: Random, sentences: list[str], name: str) -> str:
    opener = rng.choice((*words.OPENERS, ""))
    closer = rng.choice(words.CLOSERS).format(n=name)
    return " ".join(filter(None, (opener, *sentences, closer)))


def _story(rng: Random, label: str) -> list[str]:
    story = [_fill(rng, rng.choice(words.COMPLAINTS[label]))]
    if rng.random() < 0.5:
        story.append(_fill(rng, rng.choice(words.ASIDES)))
        rng.shuffle(story)
    return story


def _fill(rng: Random, sentence: str) -> str:
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
