# /// script
# dependencies = ["dspy==3.4.1"]
# ///
"""DSPy: its language model by chats, responses and completions, several answers, typed predictions by each adapter."""

import sys
from typing import Literal

import dspy

SORT = [{"role": "user", "content": "Sort ascending: 31, 7, 19"}]


def served(name: str, **more: object) -> dspy.LM:
    return dspy.LM(
        f"openai/{name}", api_base=sys.argv[1], api_key="none", cache=False, num_retries=0, **more
    )


for kind in ("chat", "responses"):
    told = served("small", model_type=kind)(messages=SORT)[0]
    assert (told["text"] if isinstance(told, dict) else told) == "7, 19, 31", told
assert served("small", model_type="text")(prompt="Sort ascending: 31, 7, 19", max_tokens=16)
assert len(served("small", temperature=1.0)(messages=SORT, n=2)) == 2


class Label(dspy.Signature):
    """Label a ticket."""

    ticket: str = dspy.InputField()
    topic: Literal["refund", "delivery"] = dspy.OutputField()


# DSPy asks for a schema by itself only of models that it knows.
schema = {
    "type": "object",
    "properties": {"topic": {"enum": ["refund", "delivery"]}},
    "required": ["topic"],
    "additionalProperties": False,
}
shape = {"type": "json_schema", "json_schema": {"name": "label", "schema": schema}}
dspy.configure(lm=served("small", max_tokens=50, response_format=shape), adapter=dspy.JSONAdapter())
found = dspy.Predict(Label)(ticket="I never got my lamp.")
assert found.topic in ("refund", "delivery"), found
for name in ("small", "agent"):
    told = served(name, max_tokens=50, response_format={"type": "json_object"})(messages=SORT)[0]
    assert told.lstrip().startswith("{"), told
