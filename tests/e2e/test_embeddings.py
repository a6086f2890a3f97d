"""Vectors are transformers' hidden states after the final norm, whatever the ranks, the chunks and the cache do."""

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.e2e.make_embedding_reference import load_embedding_reference
from tests.e2e.server_process import ServerProcess, serving, wait_until

REFERENCES = load_embedding_reference()
FLAGS = ("--dtype", "float32", "--tp-size", "2", "--chunked-prefill-size", "48")
TOLERANCE = 3e-4  # of vectors of the length 1


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("smollm2", *FLAGS) as server:
        yield server


def embed(server: ServerProcess, given: Any, pooling: str) -> list[NDArray[np.float32]]:
    body = {"input": given, "pooling": pooling, "encoding_format": "base64"}
    response = server.post("/v1/embeddings", body)
    assert response.status_code == 200, response.text
    return [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in response.json()["data"]]


def test_vectors_are_those_of_transformers(server: ServerProcess) -> None:
    for pooling in ("last", "mean", "last"):  # the second time with the prefixes in the cache
        found = embed(server, [each.prompt_ids for each in REFERENCES], pooling)
        expected = [each.vector(pooling) for each in REFERENCES]
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    wait_until(lambda: server.metric("millstream_prefix_cache_hits_total") > 0, 10, "the cache was used")
    longest = max(REFERENCES, key=lambda each: len(each.prompt_ids))
    np.testing.assert_allclose(embed(server, longest.prompt_ids, "mean")[0], longest.vector("mean"), atol=TOLERANCE)


def test_a_text_is_nearer_to_its_like_than_to_another(server: ServerProcess) -> None:
    texts = ["The cat sat on the mat.", "A kitten sits on a rug.", "Bond yields rose by ten basis points."]
    cat, kitten, bonds = embed(server, texts, "mean")
    assert cat @ kitten > cat @ bonds
