"""Settings of a served model, its folder, and the labels of classifiers; shared by gateway and worker."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from sluice.errors import SettingsError
from sluice.settings.base import Count, Name, NotNegative, Positive, Section, Share, Whole
from sluice.settings.model_cache import SUFFIX, chat_file, chat_problem, converted_folder
from sluice.settings.remote import ServerSettings

LENGTH_DEPENDENT: Final = frozenset({"dynamic", "longrope", "su"})
"""Kinds of rotary embedding whose frequencies change once a row is longer than the original context. Keys that are in
the cache already cannot change with them, and rows of one step differ in length: the context of our engine ends there.
"su" is what longrope was called."""
OFFSET_KINDS: Final = frozenset(
    {
        "roberta",
        "xlm-roberta",
        "xlm-roberta-xl",
        "camembert",
        "mpnet",
        "data2vec-text",
        "roberta-prelayernorm",
    }
)
"""Values of `model_type` whose first positions belong to padding: a text is shorter than max_position_embeddings."""
# Keys of the context length in the config.json of Hugging Face models.
_CONTEXT_KEYS: Final = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
)
_NESTED: Final = re.compile(
    r"(text|vision|audio|audio_encoder|speech|vq|codec|thinker|vlm|protein_encoder)_config"
    r"|(mm_)?vision_tower"
)
"""Keys of a config.json that models of several modalities have and text models have not."""
GENERATE: Final = (
    "set `engine: generate`, which computes it through transformers (docs/use/engines.md)"
)
"""What to do with a text model that the paged engine does not compute."""
ELSEWHERE: Final = "serve it with vLLM behind `engine: openai` (docs/use/remote-models.md)"
"""What to do with a model that our own engine does not compute."""
_ORIGINAL: Final = "original_max_position_embeddings"
CHAT_PATH: Final = "builtin:chat"
"""The shipped general model, whose weights are downloaded (`sluice.settings.model_cache`)."""


STREAMING_ENGINES: Final = frozenset({"transformers", "echo", "openai"})
"""Engines that admit requests at every step, and pad nothing."""
CONTINUOUS: Final[Mapping[str, Any]] = {"name": "continuous"}
DEFAULT_POLICIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "generate": {"name": "length", "padding_max": 0.3}
}
"""Batching policies by engine, where it is not "continuous". A step of many sequences costs "generate" hardly more than
one of few: padding is cheaper than small batches (docs/internals/decisions/0013-padding-of-generate.md)."""

LIVE_FIELDS: Final = frozenset(
    {"tier", "prompt_price", "answer_price", "max_answer_tokens", "tool_format"}
)
"""Settings of a model that gateways alone read: its workers go on when they change."""


PrefixCache = Literal["off", "tenant", "mesh"]
"""Which requests may share the cached blocks of equal prompt beginnings; see `ModelSettings.prefix_cache`."""


class ModelSettings(Section):
    """One model to serve."""

    name: Name
    """Name of the model in requests, routes and metrics."""
    generation: Whole = 0
    """Counts how often the model was replaced while the mesh ran; `sluice reload` sets it. Tasks of each generation go
    to its own workers (docs/operate/deploy.md)."""
    tier: Name = "small"
    """Tier of the model, such as small or large: a label of metrics, and what `auto` chooses between."""
    path: str
    """A folder in Hugging Face layout, a GGUF file, a hub id, or a shipped model: "builtin:small", "builtin:large",
    "builtin:chat". Of the engine "openai" only the tokenizer is used."""
    engine: Literal[
        "transformers",
        "generate",
        "classifier",
        "token_classifier",
        "embedding",
        "reranker",
        "echo",
        "openai",
    ] = "transformers"
    """"generate" computes whole padded batches through the `generate()` of any model of transformers
    (docs/use/engines.md).
    "classifier" judges texts (a sequence classification head), "token_classifier" finds entities in them (a token
    classification head, NER): both are for guards (docs/concepts/safety.md) and answer no requests of callers.
    "embedding" gives embeddings of texts, "reranker" scores of pairs of texts (one label): docs/use/embeddings.md.
    "echo" answers with the prompt's own tokens and no model: for load tests. "openai": `server` computes it."""
    server: ServerSettings | None = None
    """Somebody else's server, of the engine "openai"; `slots` is how many requests it gets at the same time."""
    echo_step_ms: float = Field(0.0, ge=0, le=10_000)
    """Time of a step of the engine "echo", in milliseconds, whatever the number of its sequences."""
    slots: int = Field(32, ge=1, le=1024)
    """Sequences that a worker computes at the same time."""
    max_waiting_rows: ClassVar[int] = 32
    """Requests that may wait inside the worker for a slot; more are refused back to the batcher."""
    context_tokens: int | None = Field(None, ge=8)
    """Longest prompt and answer together, in tokens; unset: the limit in the model's configuration."""
    max_answer_tokens: Count | None = None
    """Largest max_tokens of a request, in tokens; unset: the context. Limits what one answer can cost."""
    threads: int = Field(1, ge=1, le=256)
    """Number of torch threads of a worker."""
    device: str = "auto"
    """"auto" takes CUDA where there is one, else the CPU; "cpu"; "cuda:1" is the second CUDA device."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Numbers of CUDA devices: each worker takes the next ones (`tensor_parallel` of them). Instead of `device`."""
    tensor_parallel: int = Field(1, ge=1, le=16)
    """Devices that compute one worker together, each a part of every layer; of `devices`, else the first ones."""
    memory_share: Share | None = None
    """Share of its device's memory that one worker may take, weights and cache; unset: the workers of a device have
    equal shares of what others leave."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the numbers that the model computes in; docs/internals/decisions/engine-numerics.md says what "auto"
    takes and why."""
    quantization: Literal["none", "int8", "fp8"] = "none"
    """Keeps the weights of linear layers in 8 bits: "int8" for CPUs, "fp8" for GPUs from Ada and Hopper on;
    docs/internals/decisions/engine-numerics.md says what it costs."""
    cache_gb: Positive | None = None
    """Memory of the KV cache of a worker, in GB; unset: what `memory_share` leaves (docs/internals/engine.md)."""
    prefill_tokens: Count = 512
    """Most tokens of prompts in one step of the engine, beside one of every sequence that decodes."""
    prefix_cache: PrefixCache = "tenant"
    """Which prompts that begin with the same tokens share their blocks: those of one tenant ("tenant", also written
    true), of all tenants ("mesh": one can find out by timing what another one asked), or none ("off", also false)."""
    draft: str | None = None
    """A small model with the same tokenizer that drafts tokens for this one, where that pays; written like `path`."""
    draft_tokens: ClassVar[int] = 3
    """Tokens that are drafted at a time."""
    tool_format: Literal["hermes", "llama3", "mistral"] | None = None
    """How the model writes calls of tools (docs/use/tools.md); unset: as its chat template shows."""
    prompt_price: NotNegative = 0.0
    """Price of a million tokens of prompts, in `currency`."""
    answer_price: NotNegative = 0.0
    """Price of a million tokens of answers, in `currency`."""
    triton_url: str | tuple[str, ...] | None = None
    """Where this model is served, one address or several; unset: `triton.url`."""
    replicas: int = Field(1, ge=1, le=64)
    """Workers behind each address, of the engine "openai" for each `server.url`; each is a Triton model of its own,
    see `triton_models`."""
    standby: int = Field(0, ge=0, le=64)
    """Loaded workers that get rows only in place of others that are lost: of those at `triton_url` the last ones,
    without it as many more than `replicas`."""

    @property
    def task_name(self) -> str:
        """What tasks, reports and NATS subjects call it: the tasks of a replaced version go to its own workers."""
        return f"{self.name}--{self.generation}" if self.generation else self.name

    def same_workers(self, other: "ModelSettings") -> bool:
        """Return whether the workers of one model can serve the other."""
        return self.model_dump(exclude={*LIVE_FIELDS}) == other.model_dump(exclude={*LIVE_FIELDS})

    @property
    def computes_whole(self) -> bool:
        """Whether its engine computes a batch of requests as a whole; others admit requests at every step."""
        return self.engine not in STREAMING_ENGINES

    @property
    def default_policy(self) -> Mapping[str, Any]:
        """The batching policy of its engine where the configuration names none."""
        return DEFAULT_POLICIES.get(self.engine, CONTINUOUS)

    @property
    def resumes_exactly(self) -> bool:
        """Whether an answer that another worker continues has the same tokens (docs/use/engines.md)."""
        return self.dtype != "bfloat16"

    @property
    def answers(self) -> bool:
        """Whether it draws tokens, so that prompts can be sent to it."""
        return self.engine in ("transformers", "generate", "echo", "openai")

    @property
    def triton_models(self) -> tuple[str, ...]:
        """What its workers are called in Triton: NAME, NAME.1, NAME.2 and so on; no model can be configured as such."""
        urls = len(self.server.urls) if self.server and not self.triton_urls else 1
        count = self.replicas * urls + (0 if self.triton_urls else self.standby)
        return (self.name, *(f"{self.name}.{number}" for number in range(1, count)))

    @property
    def triton_urls(self) -> tuple[str, ...]:
        """Its own addresses; empty: `triton.url`."""
        if self.triton_url is None:
            return ()
        return (self.triton_url,) if isinstance(self.triton_url, str) else self.triton_url

    @property
    def takes_messages(self) -> bool:
        """Whether it is a server that gets conversations as messages; others get token ids."""
        return self.server is not None and self.server.api == "chat"

    @property
    def gives_logprobs(self) -> bool:
        """Whether each of its tokens can have a log-probability: tokens of chats are not ours."""
        if self.server is None:
            return True
        return self.server.api == "tokens" and "logprobs" in self.server.names

    @field_validator("prefix_cache", mode="before")
    @classmethod
    def _read_switch(cls, value: object) -> object:
        """Read true and false, and YAML's `off`, which is false."""
        if isinstance(value, bool):
            return "tenant" if value else "off"
        return value

    @field_validator("triton_url")
    @classmethod
    def _has_addresses(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if not isinstance(value, str) and value is not None and len(set(value)) != len(value):
            raise ValueError("names an address twice")
        if value == () or value == "":
            raise ValueError("name an address, or leave it out")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if problem := next(self._problems(), None):
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        if (self.engine == "openai") != (self.server is not None):
            yield 'server: belongs to the engine "openai", which needs it'
        computed = self.draft or self.devices or self.quantization != "none"
        if self.server is not None and (computed or self.tensor_parallel > 1):
            yield "server: it computes the model; leave out draft, devices, quantization, tensor_parallel"
        for key in ("draft", "tensor_parallel", "quantization", "prefix_cache"):
            is_set = getattr(self, key) != type(self).model_fields[key].default
            if self.engine == "generate" and is_set:
                yield f'{key}: belongs to the engine "transformers"; leave it out, or leave out engine: generate'
        if self.devices and self.device != "auto":
            yield "devices: leave out device; devices names the CUDA devices"
        if len(self.devices) % self.tensor_parallel:
            yield f"tensor_parallel: name a multiple of {self.tensor_parallel} devices, not {len(self.devices)}"
        if self.tensor_parallel > 1 and self.device.startswith("cuda:"):
            yield "tensor_parallel: leave out device, and name the ranks' devices in devices"
        if self.tensor_parallel > 1 and (self.draft or self.quantization != "none"):
            yield "tensor_parallel: not together with draft or quantization"
        if len(set(self.devices)) < len(self.devices):
            yield "devices: names a device twice"
        if self.triton_urls and self.standby >= len(self.triton_urls) * self.replicas:
            yield "standby: name more workers than these in triton_url and replicas"


def resolve_model_path(path: str) -> str:
    """Return the folder of a model for a shipped name, a GGUF file or a path that begins with ".", "/" or "~".

    Anything else is returned as it is (a relative folder or a hub id). A GGUF file is converted when that was not done
    before, which takes a while (`converted_folder`).

    Raises:
        SettingsError: there is no such shipped model, file or folder, or the file cannot be converted.
    """
    if path.startswith("builtin:"):
        return str(_shipped_folder(path))
    if path.lower().endswith(SUFFIX) and not Path(path).is_dir():
        return str(converted_folder(Path(path).expanduser().resolve()))
    if path.startswith((".", "/", "~")):
        folder = Path(path).expanduser().resolve()
        if not folder.is_dir():
            raise SettingsError(f"model folder {folder} does not exist")
        return str(folder)
    return path


def convert_models(models: Iterable[ModelSettings]) -> None:
    """Convert the GGUF files that `models` name, where that was not done before; progress goes to stderr.

    Raises:
        SettingsError: one cannot be converted, or does not exist.
    """
    for model in models:
        for path in filter(None, (model.path, model.draft)):
            try:
                resolve_model_path(path)
            except SettingsError as error:
                raise SettingsError(f"models: {model.name}: {error}") from error


def _shipped_folder(path: str) -> Path:
    if path == CHAT_PATH:
        if (problem := chat_problem()) is not None:
            raise SettingsError(f"{path}: {problem}")
        return converted_folder(chat_file())
    spec = find_spec("model_workers")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0], "models", path.removeprefix("builtin:"))
    if not folder.is_dir():
        raise SettingsError(
            f'no shipped model {path!r}; there are "builtin:small", "builtin:large", "{CHAT_PATH}"'
        )
    return folder


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of the language model; models of several modalities nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def check_modality(where: object, config: Mapping[str, Any], engine: str = "transformers") -> None:
    """Refuse a model of modalities that the engine does not compute.

    The paged engine computes text models and Whisper. The engine "generate" computes the text of others too.

    Args:
        where: What to call it in the error.
        config: The configuration of the model, its config.json.
        engine: As in `ModelSettings.engine`.

    Raises:
        SettingsError: what it is, and what to do.
    """
    if engine == "generate":
        if takes_audio(config):
            raise SettingsError(
                f"{where}: is a model of speech, and `engine: generate` takes text alone; leave engine out"
            )
        return
    modality = next((key for key in config if config[key] and _NESTED.fullmatch(key)), None)
    if modality is None:
        return
    named = config.get("architectures")
    kind = named[0] if isinstance(named, list) and named else config.get("model_type", "model")
    raise SettingsError(
        f"{where}: is a {kind}, a model of several modalities ({modality}), which this engine does not compute, its "
        f"text neither; {ELSEWHERE}, take a text model of the same family, or for its text alone {GENERATE}"
    )


def context_tokens_of(config: Mapping[str, Any]) -> int | None:
    """Return the context length of a Hugging Face configuration, prompt and answer together; None if it has none."""
    if config.get("is_encoder_decoder"):
        sides = side_limits(config, None)
        return None if sides is None else sides.context
    text = language_config(config)
    tokens = next((text[key] for key in _CONTEXT_KEYS if isinstance(text.get(key), int)), None)
    if tokens and text.get("model_type") in OFFSET_KINDS:
        tokens -= 1 + (text.get("pad_token_id") or 0)
    return tokens


def computed_context_of(config: Mapping[str, Any]) -> int | None:
    """Return how much of `context_tokens_of` our own engine computes."""
    tokens, text = context_tokens_of(config), language_config(config)
    if tokens is None:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    ends = [tokens]
    # Some models have one kind for each kind of layer.
    for part in (rope, *rope.values()):
        kind = (part.get("rope_type") or part.get("type")) if isinstance(part, dict) else None
        if kind in LENGTH_DEPENDENT:
            original = text.get(_ORIGINAL) or part.get(_ORIGINAL)
            ends += [original] if isinstance(original, int) else []
    return min(ends)


@dataclass(frozen=True)
class SideLimits:
    """What an encoder-decoder takes: tokens of a prompt, tokens of an answer, and both together."""

    prompt: int
    answer: int
    context: int


def side_limits(config: Mapping[str, Any], context_tokens: int | None) -> SideLimits | None:
    """Return the limits of an encoder-decoder, by its configuration and the setting; None if neither has any.

    Models that take audio have those of their decoder. Others with absolute positions have as many for each side; the
    rest take what `context_tokens` says.
    """
    if takes_audio(config):
        # What the encoder hears has no tokens: prompt and answer are both the decoder's.
        most = int(config.get("max_target_positions") or 448)
        context = min(context_tokens or most, most)
        return SideLimits(context - 1, context, context)
    positions = config.get("max_position_embeddings") or 0
    context = context_tokens or 2 * (positions or config.get("n_positions") or 0)
    if not context:
        return None
    most = min(positions or context, context)
    return SideLimits(most, most, context)


def has_marian_pieces(folder: Path) -> bool:
    """Return whether a folder has the tokenizer of a Marian model in the hub's form, without a tokenizer.json."""
    names = ("source.spm", "vocab.json")
    return not (folder / "tokenizer.json").exists() and all((folder / n).is_file() for n in names)


def takes_audio(config: Mapping[str, Any]) -> bool:
    """Return whether a model takes audio, by its configuration."""
    return config.get("model_type") == "whisper"


def chunk_s(config: Mapping[str, Any]) -> float:
    """Return the audio that a model takes at once, in seconds: Whisper's encoder has 50 positions for each."""
    return int(config.get("max_source_positions") or 1500) / 50


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels of a Hugging Face configuration by number.

    Raises:
        ValueError: there are fewer than two, or their numbers have gaps; the message says what to write.
    """
    named = config.get("id2label")
    hint = 'name them in id2label, such as {"0": "benign", "1": "malicious"}'
    if not isinstance(named, dict) or len(named) < 2:
        raise ValueError(f"has no labels; {hint}")
    names = [named.get(str(number)) for number in range(len(named))]
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise ValueError(f"numbers its labels otherwise than 0, 1, 2 and so on, each once; {hint}")
    return tuple(str(name) for name in names)
