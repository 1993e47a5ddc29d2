"""Texts that people write, none of which normalization may touch: scripts, emoji, code, tables, notation."""

from typing import Final

SCRIPTS: Final = {
    "latin": "Müller's naïve façade costs 12,50 €, she said – “really?” Żółć, Ørsted, İstanbul, Đặng Thị Hồng.",
    "cyrillic": "Съешь же ещё этих мягких французских булок, да выпей чаю. Їжак, ўсё, Ђорђе. SMSка от IT-шника.",
    "greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία· πόσο; Ἐν ἀρχῇ ἦν ὁ λόγος.",
    "arabic": "مرحبا بالعالم، كيف حالك؟ السعر ١٢٥ ريال. هـ‍ ١٤٤٥ ﷺ ﻻ بأس",
    "persian": "می‌خواهم کتاب‌های تازه‌ای بخرم، نمی‌دانم کجا.",
    "hebrew": "שָׁלוֹם עוֹלָם, מה שלומך? בְּרֵאשִׁ֖ית בָּרָ֣א אֱלֹהִ֑ים",
    "mixed_direction": "הקובץ \u2068report.pdf\u2069 נשמר\u200f! גרסה C++\u200e.",
    "devanagari": "यह एक परीक्षण वाक्य है। क्‍ष और क्‌ष अलग हैं। मूल्य १२५ रुपये।",
    "bengali": "আমি বাংলায় গান গাই। র‍্যাব, উৎসব, খণ্ড ত।",
    "tamil": "யாமறிந்த மொழிகளிலே தமிழ்மொழி போல் இனிதாவது எங்கும் காணோம்.",
    "malayalam": "എന്‍റെ പേര് മലയാളം. അവന്‍ വന്നു.",
    "sinhala": "ශ්‍රී ලංකාව මගේ රට.",
    "thai": "สวัสดีชาวโลก\u200bนี่คือการทดสอบ ราคา ๑๒๕ บาท กำลังดี",
    "khmer": "សួស្តី\u200bពិភពលោក។ ខ្ញុំ\u200bរៀន\u200bភាសា\u200bខ្មែរ។",
    "myanmar": "မင်္ဂလာပါ ကမ္ဘာလောက။",
    "tibetan": "བཀྲ་ཤིས་བདེ་ལེགས། ཧཱུྃ་ཨོཾ",
    "georgian": "გამარჯობა მსოფლიო",
    "armenian": "Բարեւ աշխարհ։ Ինչպե՞ս ես",
    "ethiopic": "ሰላም ልዑል ዓለም።",
    "mongolian": "ᠮᠣᠩᠭᠣᠯ ᠪᠢᠴᠢᠭ\u180c ᠨ\u180eᠠ",
    "chinese": "你好，世界！价格：１２５元（含税）。《红楼梦》——曹雪芹……“引号”、顿号；ＡＢＣ公司",
    "japanese": "こんにちは、世界！ｶﾀｶﾅ ㈱山田　①② ㎏ 株式会社ＮＴＴ　神\ufa19福\ufa1b 葛\U000e0100城 が゛",
    "korean": "안녕하세요 세계! 값은 １２５원입니다. 옛말 \u115f\u1161, \u1100\u1160",
    "braille": "⠓⠑⠇⠇⠕\u2800⠺⠕⠗⠇⠙",
}

EMOJI: Final = {
    "plain": "Nice 👍 work 🎉🎊 and ☕ at ⌚",
    "presentation": "I ❤️ you ☺️, and text style ☎\ufe0e © ®️ ™️ ↔️ ‼️",
    "family": "👨‍👩‍👧‍👦 👩‍👩‍👦 👩‍❤️‍💋‍👨 🧑‍🤝‍🧑",
    "professions": "👩‍💻 👨🏽‍🚀 🧑🏻‍⚕️ 👩🏾‍🏫 🕵️‍♀️ ⛹🏽‍♀️ 🧑🏻‍🦰",
    "skin": "👍🏻👍🏼👍🏽👍🏾👍🏿 👋🏽",
    "flags": "🇺🇸🇩🇪🇯🇵 🏳️‍🌈 🏳️‍⚧️ 🏴‍☠️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 🏴󠁧󠁢󠁳󠁣󠁴󠁿 🏴󠁧󠁢󠁷󠁬󠁳󠁿",
    "keycaps": "1️⃣ 2️⃣ #️⃣ *️⃣ 🔟",
    "things": "❤️‍🔥 👁️‍🗨️ 🐻‍❄️ 🐦‍⬛ 🍋‍🟩 🙂‍↔️ 😶‍🌫️",
}

CODE: Final = {
    "python": 'def f(x: list[int]) -> str:\n\treturn f"{x!r:>{10}}" if x[0] << 2 else r"\\n" # naïve\n',
    "c": '#include <stdio.h>\nint main(void) { printf("%s\\n", a[i] <= b ? "<" : ">"); return x & ~0x1f | y; }\n',
    "c++": "template <typename T> std::vector<std::pair<int, T>>& operator<<(S& s, T&& t) { return s << t; }",
    "rust": "fn f<'a>(x: &'a str) -> Result<Vec<u8>, Box<dyn Error>> { x.iter().map(|a| a + 1).collect() }",
    "haskell": "f <$> a <*> b <|> c >>= \\x -> [x | x <- xs]",
    "f#": "[1..3] |> List.map (fun x -> x * x) |> List.sum\nlet g x = f <| x |> h",
    "shell": 'cat <<EOF | grep -E "^[[:alpha:]]+" 2>&1 >/dev/null\n${A[@]}\nEOF\n',
    "html": "<p>Was <s>19.99</s> now <b>9.99</b></p>\n<ul><li>a<li>b</ul><img src='a.png'/><!-- </x> -->",
    "json": '{"a": [1, 2.5e-3, null], "b": {"c": "\\u200b and \\ud83d"}}',
    "regex": r"^(?:[^\s<>|]{1,64}\|)+$ \x1b\[[0-9;]*m",
    "latex": r"\frac{\partial f}{\partial x} = \sum_{i=1}^{n} \alpha_i \langle x_i, y \rangle",
    "tokens": "The list a[inst] holds [CLS] and [SEP]; use <input> or <system> and x<|y.",
    "sql": "SELECT * FROM t WHERE a <> 'b' AND c IN (1,2) -- [INSTANCE]",
}

TABLES: Final = {
    "markdown": "| a | b |\n|---|:-:|\n| 1 | ½ |\n| x² | H₂O |\n",
    "box": "┌───┬───┐\n│ a │ █ │\n└───┴───┘",
    "tabs": "name\tprice\n上海\t１２\n",
    "nbsp": "10\xa0000\u202f€ 5\u2009km\u3000全角",
}

NOTATION: Final = {
    "mathematics": "Let 𝑥 ∈ ℝ, 𝑓(𝑥) = 𝑎𝑥² + 𝑏, 𝔼[𝑋] ≤ ∑ᵢ 𝑝ᵢ, 10¹⁰⁰⁰, ∩\ufe00, ℏ, ½ + ⅓, xⁿ⁺¹",
    "formulas": "cosα, ΔT, λx, μm, kΩ, 5 µm, ρgh",
    "ipa": "[ˈpʰɪt͡ʃʰ] kʷ tʲ n̪̊ ɹ̠̊˔",
    "ordinals": "1ª 2º 3ᵉ Mᵐᵉ 4ᵗʰ ™ № Ⅷ ① Ⓐ ⑩",
    "ligatures": "ﬁne eﬀort ŒUVRE ĳ ǆ ﬀ",
    "symbols": "→ ⇒ ≠ ≤ ∞ √ ♠ ♥ ☃ ♞ ⌘ ⏎ … ‰ § ¶ † •",
}

LEGITIMATE: Final = {
    f"{group}/{name}": text
    for group, texts in (
        ("script", SCRIPTS), ("emoji", EMOJI), ("code", CODE), ("table", TABLES), ("notation", NOTATION),
    )
    for name, text in texts.items()
}  # fmt: skip
