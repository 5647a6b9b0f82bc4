"""The server of a bidirectional model, asked for embeddings by OpenAI's client."""

import functools

import numpy as np
import openai
import pytest
from threaded import serving_here
from tiny_servers import make_run

import maxmeg
from maxmeg import serve
from maxmeg.config.head import Biencoder, two_encoders
from maxmeg.config.model import Position
from maxmeg.config.options import Serve

ROOM = 64
ENCODER = {"attention.causal": False, "max_position": ROOM, "bert.pooler": True}
TWO = {"head.biencoder": Biencoder.separate, "layers": two_encoders(2), "num_layers": 4}
TWO |= {"attention.causal": False, "max_position": ROOM, "position": Position.learned, "tied": True}
BAD = [
    ({"input": "a", "unknown": 1}, 400, "unknown"),
    ({"input": []}, 400, "0 texts: give 1 to 2048"),
    ({"input": "a" * 50}, 400, "text 0 has 51 tokens, and 1 to 49 are allowed"),
    ({"input": [99999]}, 400, "vocabulary"),
    ({"input": "a", "dimensions": 8}, 400, "have 32 numbers"),
    ({"input": "a", "input_type": "passage"}, 400, "input_type"),
    ({"input": "a", "model": "other"}, 404, "'other' is not served, only 'tiny'"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("encoder"), **ENCODER)


@pytest.fixture(scope="module")
def server(run):
    with serving_here(run, "--max_prompt=49", key="a key", sizes=()) as started:
        yield started


def test_embeddings_are_those_of_the_model(server, run):
    model = maxmeg.load(run)
    texts, ids = ["one", "a longer 😀", "two"] * 4, [1, 2, 3]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="a key", max_retries=0) as client:
        ask = functools.partial(client.embeddings.create, model="tiny")
        for form in ("float", "base64"):  # which the client decodes
            answer = ask(input=texts, encoding_format=form)
            assert [each.index for each in answer.data] == [*range(12)]
            assert answer.usage.prompt_tokens == sum(len(text.encode()) + 1 for text in texts)
        for pooling in ("mean", "first", "pooler"):
            answer = ask(input=texts, extra_body={"pooling": pooling})
            found = np.array([each.embedding for each in answer.data])
            np.testing.assert_allclose(found, model.embed(texts, pooling), rtol=0, atol=1e-6)
            assert np.linalg.norm(found, axis=1) == pytest.approx(1)
            assert np.abs(found[0] - found[1]).max() > 0.1
        (one,) = ask(input=ids).data
        whole = ask(input="b" * 99, extra_body={"truncate": True})
    np.testing.assert_allclose(one.embedding, model.embed([ids])[0], rtol=0, atol=1e-6)
    assert whole


@pytest.mark.parametrize(("body", "status", "text"), BAD)
def test_bad_requests_are_named(server, body, status, text):
    answer = server.ask("/v1/embeddings", body)
    assert answer.status == status and text in answer.json["error"]["message"]


def test_what_an_encoder_does_not_have(server):
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = server.ask(path, {"prompt": "a"})
        assert answer.status == 400 and "it has /v1/embeddings" in answer.json["error"]["message"]
    assert server.ask("/", key="").status == 404
    assert server.ask("/v1/embeddings", {"input": "a"}, "").status == 401
    assert server.ask("/tokenize", {"prompt": "ab"}).json["count"] == 3  # and the end of a text
    assert server.metrics()["num_requests_waiting"] == 0


def test_options_of_generation_are_refused(run):
    with pytest.raises(ValueError, match=r"--log, --max_num_seqs: .* the model is bidirectional"):
        serve.main(Serve(run_dir=str(run), port=0, max_num_seqs=2, log="log"))


@pytest.mark.slow
def test_queries_have_an_encoder_of_their_own(tmp_path):
    run, texts = make_run(tmp_path, **TWO), ["one", "a longer 😀"]
    model = maxmeg.load(run)
    vectors = {"document": model.embed(texts), "query": model.embed(texts, queries=True)}
    assert np.abs(vectors["query"] - vectors["document"]).max() > 0.1
    with serving_here(run, sizes=()) as server:
        for kind, wanted in vectors.items():
            answer = server.ask("/v1/embeddings", {"input": texts, "input_type": kind})
            found = [each["embedding"] for each in answer.json["data"]]
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
        answer = server.ask("/v1/embeddings", {"input": "a", "pooling": "mean"})
        assert answer.status == 400 and "biencoder=separate" in answer.text
