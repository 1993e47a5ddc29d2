"""The vocabulary of the support tasks: names, products, and how customers describe each kind of trouble."""

from typing import Final

_NAMES: Final = (
    "Anna Ben Carla David Elena Farid Grace Hugo Ines Jonas "
    "Karim Lena Marco Nadia Oscar Paula Quinn Rosa Samir Tessa "
    "Umar Vera Walter Xenia Yusuf Zoe Amina Bruno Chen Dora "
    "Emil Fatima Gustav Hanna Igor Julia Kofi Laura Mehmet Nora"
)
NAMES: Final = tuple(_NAMES.split(" "))
PRODUCTS: Final = (
    "desk lamp",
    "coffee grinder",
    "headphones",
    "keyboard",
    "backpack",
    "water bottle",
    "office chair",
    "phone case",
    "bike light",
    "toaster",
    "monitor",
    "rain jacket",
    "hiking boots",
    "router",
    "camera",
    "kettle",
    "speaker",
    "blender",
    "tent",
    "watch",
)

# Label -> what a customer writes. The order of the labels is the order the prompt may list them in.
COMPLAINTS: Final[dict[str, tuple[str, ...]]] = {
    "refund": (
        "I sent the {p} back {d} days ago and have not seen my money yet.",
        "When do I get my money back for the {p} I returned?",
        "I returned the {p} and I am still waiting for the refund.",
        "You have received my return of the {p}, please pay me back.",
        "The {p} went back to you last week. Where is my refund?",
        "I would like my money back for the {p} that I returned.",
    ),
    "delivery": (
        "The {p} should have been here {d} days ago.",
        "My {p} has still not arrived.",
        "Where is my parcel with the {p}?",
        "The tracking of my {p} has not moved for {d} days.",
        "I am still waiting for the {p} to be delivered.",
        "The courier never came with my {p}.",
    ),
    "damaged": (
        "The {p} arrived broken.",
        "When I opened the box, the {p} was cracked.",
        "The {p} has a big dent straight out of the box.",
        "The parcel was crushed and the {p} inside is in pieces.",
        "My new {p} came with a deep scratch.",
        "The {p} was smashed when the parcel got here.",
    ),
    "wrong_item": (
        "I ordered a {p} but the box contained a {q}.",
        "You sent me a {q} instead of the {p}.",
        "This is not the {p} that I chose, it is a {q}.",
        "There was a {q} in the parcel, yet I bought a {p}.",
        "I got a {q}. I never ordered that, I wanted the {p}.",
        "The {p} is in the wrong colour, I picked another one.",
    ),
    "billing": (
        "I was charged twice for the {p}.",
        "The invoice for the {p} shows the wrong amount.",
        "My card was debited two times for one {p}.",
        "The price on the bill is higher than the price of the {p} in the shop.",
        "My discount code is missing from the invoice for the {p}.",
        "You took {d} euros too much for the {p}.",
    ),
    "login": (
        "I cannot log in to see my order of the {p}.",
        "My password is not accepted any more.",
        "The reset link for my account does not work.",
        "My account is locked since I ordered the {p}.",
        "The page says that my user name is unknown.",
        "I forgot my password and cannot get into my account.",
    ),
    "cancel": (
        "Please stop my order of the {p}, I do not need it any more.",
        "I want to cancel the {p} before it ships.",
        "I changed my mind about the {p}, please do not send it.",
        "I ordered the {p} by mistake. Please cancel it.",
        "Can you take the {p} out of my order? I no longer want it.",
        "Please call off the order, I found a {p} elsewhere.",
    ),
    "warranty": (
        "After {d} months the {p} stopped working.",
        "The {p} worked well for {d} months and now it is dead.",
        "My {p} no longer switches on. I bought it {d} months ago.",
        "The {p} failed within the guarantee period.",
        "Is the {p} still under warranty? It broke after {d} months of use.",
        "The {p} has become faulty after {d} months.",
    ),
}
LABELS: Final = tuple(COMPLAINTS)

# Sentences that carry no label, some of them with words that another label likes to use.
ASIDES: Final = (
    "I have been a customer for {d} years.",
    "The delivery was quick, by the way.",
    "The price was fine.",
    "I like your shop.",
    "The log in page looks nice.",
    "I do not want to cancel anything.",
    "I do not ask for a refund.",
    "The box itself was not damaged.",
    "The invoice is correct.",
    "My neighbour has the same {q} and is happy.",
    "This is the second time I write.",
    "It was a present.",
    "I need an answer this week.",
    "I already called you {d} times.",
)
OPENERS: Final = (
    "Hello,",
    "Hi there,",
    "Good morning,",
    "Dear team,",
    "Hi,",
    "To whom it may concern,",
)
CLOSERS: Final = ("Thanks, {n}", "Regards, {n}", "{n}", "Best, {n}", "Kind regards, {n}")

# Label -> the one sentence of policy a reply must contain.
POLICIES: Final[dict[str, str]] = {
    "refund": "Your refund will be on your account within 5 working days.",
    "delivery": "We have asked the courier to find your parcel and deliver it within 2 days.",
    "damaged": "We are sending you a replacement today at no cost.",
    "wrong_item": "We will send the right item today and collect the other one for free.",
    "billing": "We are correcting the invoice and will pay back any difference.",
    "login": "We have sent a new link to reset your password, valid for 24 hours.",
    "cancel": "Your order is cancelled and nothing will be charged.",
    "warranty": "The repair is covered by your warranty, a prepaid label is on its way.",
}
SIGNATURE: Final = "Kind regards, the support desk"
