"""A Triton model as one would write it without Sluice: `generate` of transformers on what the dynamic batcher gathered.

Loaded by Triton's Python backend. Parameters `folder` (of the checkpoint) and `threads`; inputs `prompt` (text of a
user's message) and `max_tokens`; output `answer`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModelForCausalLM, AutoTokenizer


class TritonPythonModel:
    """The model class that Triton's Python backend loads."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the checkpoint."""
        parameters = json.loads(args["model_config"])["parameters"]
        folder = parameters["folder"]["string_value"]
        torch.set_num_threads(int(parameters["threads"]["string_value"]))
        load_tokenizer: Any = AutoTokenizer.from_pretrained
        load_model: Any = AutoModelForCausalLM.from_pretrained
        self._tokenizer = load_tokenizer(folder, padding_side="left")
        self._model = load_model(folder, dtype=torch.float32).eval()
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token_id = 0

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One padded batch of all requests, as long as the longest answer asked for."""
        prompts = [self._rendered(_value(request, "prompt").decode()) for request in requests]
        wanted = [int(_value(request, "max_tokens")) for request in requests]
        batch = self._tokenizer(
            prompts, return_tensors="pt", padding=True, add_special_tokens=False
        )
        with torch.inference_mode():
            rows = self._model.generate(**batch, max_new_tokens=max(wanted), do_sample=False)
        answers = rows[:, batch["input_ids"].shape[1] :]
        return [
            _response(self._tokenizer.decode(row[:count])) for row, count in zip(answers, wanted, strict=True)
        ]  # fmt: skip

    def _rendered(self, prompt: str) -> str:
        turns = [{"role": "user", "content": prompt}]
        return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))  # fmt: skip


def _value(request: Any, name: str) -> Any:
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0]


def _response(text: str) -> Any:
    tensor = pb_utils.Tensor("answer", np.array([[text.encode()]], dtype=np.object_))
    return pb_utils.InferenceResponse(output_tensors=[tensor])
