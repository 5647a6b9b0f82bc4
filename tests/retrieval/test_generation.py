"""What RETRO writes: equal to forward passes over samples of the same text, whose neighbours the
data code has found."""

import copy

import jax
import numpy as np
import pytest
from layouts import mesh_of, tiny, tiny_state
from retro_corpus import CHUNK, LENGTH, SPLIT, TOKENIZER, embed, find, settings, write
from tiny_servers import make_run

import maxmeg
from maxmeg import generate
from maxmeg.config import options
from maxmeg.config.model import DType, Position
from maxmeg.config.retro import Neighbours, retro_layers
from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter
from maxmeg.data.samples.retro import RetroDataset
from maxmeg.inference.engine import Engine
from maxmeg.inference.load import Trained
from maxmeg.inference.prompts import prompt_tokens
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling
from maxmeg.layers.context import Context, Source
from maxmeg.retrieval import neighbours
from maxmeg.retrieval.generation import Generator
from maxmeg.retrieval.neighbours import Encoder, open_search

TOLERANCE = 1e-5  # of log-probabilities
NEW, WHOLE, TRAINING = 12, 24, 32  # tokens; documents of the training split
LETTERS = Encoder(embed, "letters")
MODEL = {
    **{"layers": retro_layers((1,), 1, 1), "num_layers": 4, "position": Position.learned},
    **{"retro.chunk_length": CHUNK, "retro.neighbour_length": LENGTH, "vocab_size": 257},
    **{"max_position": WHOLE, "init_std": 0.3},
}
GREEDY, SAMPLED = Sampling(temperature=0), Sampling(temperature=1.5, top_k=9)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return find(write(tmp_path_factory.mktemp("corpus")))


def trained(data, **parallel: int) -> Trained:
    parallel = parallel or {"fsdp": 1}
    config = tiny(MODEL, **parallel)  # pyright: ignore
    config.data = copy.copy(data)
    mesh = mesh_of(config)
    return Trained(tiny_state(config, mesh)[2].model, config, TOKENIZER, 0, mesh)


@pytest.fixture(scope="module")
def model(data):
    return trained(data)


@pytest.fixture(scope="module")
def generator(model):
    """Batches of two texts; a stream is a batch of one."""
    return Generator(model, open_search(model.config, LETTERS), batch=2)


@pytest.fixture(scope="module")
def prompts(data):
    """Chunks are whole at different tokens of them."""
    corpus = IndexedDataset(data.paths[0])
    return [corpus.get(TRAINING + number)[:size] for number, size in enumerate((9, 11, 12, 10))]


def samples(data, texts, folder) -> RetroDataset:
    """Of a validation split with these texts, beside the same training split."""
    corpus, prefix = IndexedDataset(data.paths[0]), str(folder / "with_texts")
    with IndexedWriter(prefix, 257) as writer:
        for tokens in [*map(corpus.get, range(TRAINING)), *texts]:
            writer.add_document(tokens, [len(tokens)])
    split = f"{TRAINING},{len(texts)},0"
    config = find(prefix, split=split, sequence_length=WHOLE)
    return RetroDataset(IndexedDataset(prefix), split, 1, config, TOKENIZER, 0)


@jax.jit
def logits(model, batch):
    source = Source.of(batch["encoder_tokens"], batch["encoder_segment_ids"])
    ctx = Context(batch["positions"], batch["segment_ids"], source=source)
    return model.logits(model.hidden(batch["tokens"], ctx)[0])


def test_tokens_are_the_likeliest_of_forward_passes_over_samples(
    model, generator, prompts, data, tmp_path, monkeypatch
):
    """Two batches; a chunk's neighbours are looked up once it is whole."""
    search, found = generator.search, {}

    def recorded(ids):
        near = search(ids)
        found.update(zip(map(bytes, ids), zip(*near, strict=True), strict=True))
        return near

    monkeypatch.setattr(generator, "search", recorded)
    replies = generator.generate(prompts, Request(NEW, GREEDY))
    texts = [np.array([*reply.prompt, *reply.tokens], np.int32) for reply in replies]
    batch = samples(data, texts, tmp_path).batch(np.arange(len(texts)))
    logits_BLV = jax.nn.log_softmax(logits(model.model, batch))
    for reply, text, row_LV in zip(replies, texts, logits_BLV, strict=True):
        wanted_LV = row_LV[len(reply.prompt) - 1 :][:NEW]
        assert reply.tokens == wanted_LV.argmax(axis=-1).tolist() and reply.reason == "length"
        np.testing.assert_allclose(reply.logprobs, wanted_LV.max(axis=-1), atol=TOLERANCE)
        whole = (len(text) - 1) // CHUNK  # without the one that the last token completes
        assert all(bytes(ids) in found for ids in text[: whole * CHUNK].reshape(-1, CHUNK))
    names = ("tokens", "encoder_tokens", "encoder_segment_ids")
    rows = (batch[name].reshape(len(texts) * WHOLE // CHUNK, -1) for name in names)
    for chunk, near, segments in zip(*rows, strict=True):
        if known := found.get(bytes(chunk)):
            assert (known[0] == near).all() and (known[1] == (segments > 0)).all()
    monkeypatch.setattr(generator, "search", None)
    without = generator.generate(prompts, Request(NEW, GREEDY))
    assert all(a.tokens != b.tokens for a, b in zip(without, replies, strict=True))


def test_pieces_join_to_the_reply_and_end_as_asked(generator, prompts):
    request = Request(NEW, SAMPLED)
    reply, other = generator.generate([prompts[0]] * 2, request, seed=3)
    assert "".join(generator.stream(prompts[0], request, 3)) == reply.text
    assert reply.tokens != other.tokens  # by their numbers
    end = reply.tokens[5]
    ended = generator.generate(prompts[:1], Request(NEW, SAMPLED, ends=(end,)), 3)[0]
    assert ended.reason == "stop" and ended.tokens == reply.tokens[: reply.tokens.index(end)]


def test_what_is_refused(model, generator, prompts, data):
    for prompt, request, message in (
        (prompts[0], Request(16, GREEDY), "at most 15 tokens"),
        (prompts[0][:0], Request(1, GREEDY), "prompt is empty"),
        (prompts[0], Request(1, GREEDY, prompt_logprobs=True), "prompt_logprobs=True.* alone"),
        (prompts[0], Request(1, Sampling(top_logprobs=2)), "top_logprobs=2.* alone"),
    ):
        with pytest.raises(ValueError, match=message):
            generator.generate([prompt], request)
    with pytest.raises(ValueError, match="only `maxmeg generate RUN_DIR --encoder=RUN_DIR` looks"):
        Engine(model)
    with pytest.raises(ValueError, match=r"another encoder.*letters.*words"):
        open_search(model.config, Encoder(embed, "words"))
    cases = [({}, "give --encoder=RUN_DIR"), ({"pooling": "mean"}, "give --encoder=RUN_DIR")]
    for kind in (Neighbours.shuffled, Neighbours.none):
        cases.append(({"encoder": "a", "read_neighbours": kind}, kind.value))
    for given, message in cases:
        other = Trained(model.model, copy.deepcopy(model.config), TOKENIZER, 0, model.mesh)
        other.config.data.read_neighbours = given.pop("read_neighbours", Neighbours.nearest)
        message = "reads no neighbours" if message == "none" else message
        with pytest.raises(ValueError, match=message):
            generate.make_engine(other, options.Generate(**given), 1)
    assert prompt_tokens(TOKENIZER, model.config, "a").tolist() == [97]  # it is no source


@pytest.mark.slow
def test_tensor_parallelism_gives_the_same_replies(model, prompts, data):
    search = open_search(model.config, LETTERS)
    found, wanted = (
        Generator(one, search, batch=3).generate(prompts, Request(NEW, SAMPLED), 3)
        for one in (trained(data, tensor=2), model)
    )
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=TOLERANCE)


@pytest.mark.slow
def test_the_command_continues_prompts_with_an_encoder(model, data, tmp_path, capsys):
    fields = {"attention.causal": False, "max_position": 64, "dtype": DType.bfloat16}
    encoder = str(make_run(tmp_path / "encoder", **fields))
    other = Trained(model.model, copy.deepcopy(model.config), TOKENIZER, 0, model.mesh)
    other.config.data = settings(write(tmp_path, documents=12), split=SPLIT)
    neighbours.main(other.config, options.Neighbours(encoder=encoder, pooling="first"))
    run, flags = str(tmp_path / "run"), {"num_tokens": 8, "temperature": 0, "encoder": encoder}
    maxmeg.LanguageModel.of(other).save(run)
    capsys.readouterr()
    asked = options.Generate(run_dir=run, prompt=["abcdefghij"], pooling="first", **flags)
    generate.main(asked)
    assert capsys.readouterr().out.startswith("abcdefghij")
    with pytest.raises(ValueError, match="another encoder"):
        generate.main(options.Generate(run_dir=run, prompt=["a"], **flags))
