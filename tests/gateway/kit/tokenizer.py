"""A small byte-level tokenizer with a chat template, in the layout of a Hugging Face model."""

import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, BOS, SYSTEM, USER, ASSISTANT, END = SPECIALS = (
    "<|pad|>",
    "<|bos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
TEMPLATE: Final = (
    "<|bos|>{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOOLS_TEMPLATE: Final = (
    "<|bos|>{% if tools %}<|system|>Write <tool_call>JSON</tool_call>. Tools:"
    "{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}{{ '<|user|>' if message.role == 'tool' else '<|' + message.role + '|>' }}"
    "{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As of the Hermes family."""
CONTEXT: Final = 256
_TEXTS: Final = ("hello world, how are you today? ", "the answer is 42. ", "<|assistant|> ") * 4


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that exists."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def write_model(folder: Path, *, template: str | None = TEMPLATE, context: int = CONTEXT) -> Path:
    """A model's small files; there are no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": END, "pad_token": PAD}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = {"max_position_embeddings": context, "vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(model))
    generation = {"eos_token_id": tokenizer.token_to_id(END)}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
