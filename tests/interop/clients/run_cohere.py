# /// script
# dependencies = ["cohere==7.3.1"]
# ///
"""Cohere's client: rerank."""

import sys

import cohere

BASE = sys.argv[1].removesuffix("/v1")
DOCUMENTS = ["w2", "w3", "w4"]
second = cohere.ClientV2(api_key="none", base_url=BASE)
found = second.rerank(model="rank", query="w1", documents=DOCUMENTS, top_n=2)
assert len(found.results) == 2
assert found.results[0].relevance_score >= found.results[1].relevance_score
assert found.id
first = cohere.Client(api_key="none", base_url=BASE)
found = first.rerank(model="rank", query="w1", documents=DOCUMENTS, return_documents=True)
assert found.results[0].document.text in DOCUMENTS
try:
    second.rerank(model="none", query="w1", documents=DOCUMENTS)
except cohere.NotFoundError:
    pass
else:
    raise AssertionError("none")
