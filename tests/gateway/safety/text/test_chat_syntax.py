"""Chat-template syntax: every token is broken in plain sight, HTML and code are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.safety.text.normalize import TOKENS, normalize

SHAPED = [
    "<|im_start|>",
    "<|assistant|>",
    "<|begin_of_text|>",
    "<|eot_id|>",
    "<|endoftext|>",
    "<|end|>",
    "<|x|>",
]
LONE = [token for token in [*TOKENS, *SHAPED] if token != "<s>"]


@pytest.mark.parametrize("token", [*LONE, "<s>"])
def test_tokens_are_broken_behind_their_first_character(token: str) -> None:
    normalized = normalize(f"x{token}y")
    assert normalized.text == f"x{token[0]} {token[1:]}y"
    assert [(f.rule, f.start, f.end) for f in normalized.findings] == [
        ("syntax.chat_template", 1, 1 + len(token))
    ]


@pytest.mark.parametrize("token", LONE)
def test_full_width_tokens_are_broken_too(token: str) -> None:
    wide = "".join(chr(ord(letter) + 0xFEE0) for letter in token)
    assert normalize(wide).text == f"{token[0]} {token[1:]}"
    in_chinese = normalize(f"漢字{wide}").text
    assert in_chinese == f"漢字{wide[0]} {wide[1:]}"


@pytest.mark.parametrize(
    "text", ["<｜begin▁of▁sentence｜>", "漢<｜User｜>", "<|ａssistant|>", "漢[ＩNST]", "[𝐈𝐍𝐒𝐓]"]
)
def test_styled_letters_do_not_hide_syntax(text: str) -> None:
    assert "syntax.chat_template" in {finding.rule for finding in normalize(text).findings}


PIECES = st.sampled_from([*LONE, *"<|>[a /", "im_start", "<s>"])


@given(st.lists(PIECES, max_size=12).map("".join))
def test_no_token_survives_and_nothing_is_lost(text: str) -> None:
    normalized = normalize(text).text
    assert not any(token in normalized for token in [*LONE, "<|im_start|>"] if token != "</s>")
    assert normalized.replace(" ", "") == text.replace(" ", "")


def test_struck_html_stays_and_lone_ends_do_not() -> None:
    assert normalize("<s>old</s> new <s>a <s>b</s></s>").text == "<s>old</s> new <s>a <s>b</s></s>"
    assert normalize("hi</s><s>[INST]").text == "hi< /s>< s>[ INST]"
    assert normalize("</s>x<s>").text == "< /s>x< s>"


def test_tokens_inside_tokens_are_broken() -> None:
    assert normalize("<|<|im_start|>|>").text == "<|< |im_start|>|>"
    assert normalize("[[INST]]").text == "[[ INST]]"
