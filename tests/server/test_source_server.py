"""The server of an encoder-decoder: completions are what the model writes for a source."""

import concurrent.futures

import pytest
from threaded import serving_here
from tiny_servers import make_run

import maxmeg
from maxmeg.config.model import Position

LAYERS = "2(encoder_attention,encoder_mlp) encoder_norm *(attention,cross,mlp)"
MODEL = {"layers": LAYERS, "num_layers": 5, "position": Position.relative, "max_position": 64}
SOURCES = ["one", "a longer 😀 source", "two", "x"]


@pytest.mark.slow
def test_completions_are_those_of_the_model(tmp_path):
    run = make_run(tmp_path, template="", **MODEL)
    model = maxmeg.load(run)
    body = {"temperature": 0, "max_tokens": 20}
    wanted = [model.generate(text, 20, temperature=0) for text in SOURCES]
    with serving_here(run, "--max_prompt=49", sizes=("--max_num_seqs=2",)) as server:

        def ask(prompt, **more):
            return server.ask("/v1/completions", {"prompt": prompt, **body, **more})

        answers = ask(SOURCES).json
        assert [each["text"] for each in answers["choices"]] == wanted
        sizes = [len(text.encode()) + 1 for text in SOURCES]  # and the end of text
        assert answers["usage"]["prompt_tokens"] == sum(sizes)
        with concurrent.futures.ThreadPoolExecutor(len(SOURCES)) as pool:
            found = [answer.json["choices"][0]["text"] for answer in pool.map(ask, SOURCES)]
        assert found == wanted and len({*found}) > 2
        for bad, text in (
            ({"echo": True}, "not supported for encoder-decoder"),
            ({"max_tokens": 64}, "63"),
        ):
            answer = ask("one", **bad)
            assert answer.status == 400 and text in answer.json["error"]["message"]
        chat = {"messages": [{"role": "user", "content": "one"}]}
        answer = server.ask("/v1/chat/completions", chat)
        assert answer.status == 400 and "no chat template" in answer.json["error"]["message"]
