"""Outcomes with a structure that is known: what is hard for the small model shows in the prompt or in its answer."""

import random

from learning.outcomes import RouterOutcome

EASY = "What colour is the sky over the sea on a clear day"
HARD = "Calculate the remaining total of 3 boxes with 17 each if 4 of 12 are fewer than half"
TOPICS = ("garden", "river", "kitchen", "train", "window", "letter", "market", "forest")


def outcomes(count: int, seed: int = 0, answers: bool = False) -> list[RouterOutcome]:
    """Hard prompts: the small model is right in 1 of 10, the large one in 9. Easy ones: both in 9 of 10."""
    draw = random.Random(seed)
    rows = []
    for row in range(count):
        hard = draw.random() < 0.5
        prompt = f"{HARD if hard else EASY} near the {draw.choice(TOPICS)} {draw.choice(TOPICS)}?"
        weak = float(draw.random() < (0.1 if hard else 0.9))
        answer = None
        if answers:
            # Here the prompt tells nothing; a wrong answer has a sum that does not add up.
            prompt = f"How many are 5 and 7 by the {draw.choice(TOPICS)} {draw.choice(TOPICS)}?"
            weak = float(draw.random() < 0.5)
            answer = f"There are 5 + 7 = {12 if weak else draw.randint(13, 40)} in all.\n#### 12"
        rows.append(RouterOutcome(f"p{row}", prompt, weak, float(draw.random() < 0.9), answer))
    return rows
