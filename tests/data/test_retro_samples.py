"""RETRO's chunks, neighbours and samples."""

import dataclasses

import numpy as np
import pytest
from retro_corpus import CHUNK, LENGTH, NEIGHBOURS, SPLIT, TOKENIZER, embed, find, settings, write
from tiny_servers import make_run

from maxmeg.config import options
from maxmeg.config.model import DType
from maxmeg.config.retro import Neighbours
from maxmeg.configs import retro
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.samples.dataset import SPLITS
from maxmeg.data.samples.retro import Chunks, RetroDataset, folder_of, split_chunks
from maxmeg.retrieval import neighbours

TOLERANCE = 1e-6  # of float32 sums of at most CHUNK products of at most 1


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    prefix = write(tmp_path_factory.mktemp("corpus"))
    return IndexedDataset(prefix), find(prefix)


def dataset(prepared, split_index=0, **others) -> RetroDataset:
    corpus, config = prepared
    config = dataclasses.replace(config, **others)
    return RetroDataset(corpus, SPLIT, split_index, config, TOKENIZER, seed=1)


def test_chunks_cover_documents_and_do_not_cross_them(prepared):
    corpus, _ = prepared
    chunks = Chunks(corpus, 3, 9, CHUNK)
    ids, sizes = chunks.read(np.arange(len(chunks)), CHUNK)
    documents = chunks.documents(np.arange(len(chunks)))
    for document in range(6):
        parts = [row[:size] for row, size in zip(ids, sizes, strict=True)]
        own = [part for part, of in zip(parts, documents, strict=True) if of == document]
        assert np.concatenate(own).tolist() == corpus.get(3 + document).tolist()
        assert all(len(part) == CHUNK for part in own[:-1]) and len(own[-1]) > 0
    longer, sizes = chunks.read(np.arange(len(chunks)), LENGTH)
    assert (longer[:, :CHUNK] == ids).all()
    for row, size, document, number in zip(longer, sizes, documents, range(len(ids)), strict=True):
        at = (number - chunks.bounds[document]) * CHUNK
        assert row[:size].tolist() == corpus.get(3 + int(document))[at : at + LENGTH].tolist()


def test_neighbours_are_the_nearest_of_other_documents(prepared):
    corpus, config = prepared
    database = split_chunks(corpus, SPLIT, 0, CHUNK)
    numbers = np.arange(len(database))

    def vectors(chunks):
        ids, sizes = chunks.read(np.arange(len(chunks)), CHUNK)
        rows = zip(ids, sizes, strict=True)
        return embed([TOKENIZER.decode(row[:size].tolist()) or " " for row, size in rows])

    for number, name in enumerate(SPLITS):
        chunks = split_chunks(corpus, SPLIT, number, CHUNK)
        scores = vectors(chunks) @ vectors(database).T
        if not number:
            own = database.documents(numbers)
            scores[own[:, None] == own] = -np.inf
        table = np.load(folder_of(config) / f"{name}.npy")
        assert table.shape == (len(chunks), NEIGHBOURS)
        best = -np.sort(-scores, axis=1)[:, :NEIGHBOURS]
        assert np.allclose(np.take_along_axis(scores, table, axis=1), best, atol=TOLERANCE)


@pytest.mark.parametrize("split_index", [0, 2])
def test_samples_hold_chunks_and_their_neighbours(prepared, split_index):
    data = dataset(prepared, split_index)
    batch = data.batch(np.arange(data.samples_per_epoch))
    assert {name: array.shape[1] for name, array in batch.items()} == {
        **dict.fromkeys(("tokens", "targets", "loss_mask", "segment_ids", "positions"), 16),
        **dict.fromkeys(("encoder_tokens", "encoder_segment_ids"), 4 * NEIGHBOURS * LENGTH),
    }
    documents = [prepared[0].get(i) for i in range(*((0, 32) if split_index == 0 else (36, 40)))]
    predicted = sum(len(document) - 1 for document in documents)
    assert batch["loss_mask"].sum() == predicted and data.num_tokens == predicted + len(documents)
    segments, is_target = batch["segment_ids"], batch["loss_mask"] > 0
    assert (segments[is_target] % 2 == 1).all()  # even ones are padding at a document's end
    follows = is_target[:, :-1] & (segments[:, :-1] == segments[:, 1:])
    assert (batch["targets"][:, :-1] == batch["tokens"][:, 1:])[follows].all()
    near = batch["encoder_segment_ids"].reshape(len(segments), 4, NEIGHBOURS * LENGTH)
    first = segments.reshape(len(segments), 4, CHUNK)[..., :1]
    assert ((near == first) | (near == 0)).all() and (near[..., 0] == first[..., 0]).all()
    of_training = [bytes(prepared[0].get(i)[:-1].astype(np.uint8)) for i in range(32)]
    for row in batch["encoder_tokens"].reshape(-1, LENGTH)[:50]:
        text = bytes(row[(row > 0) & (row < 256)].astype(np.uint8))
        assert any(text in document for document in of_training)


def test_shuffled_and_absent_neighbours(prepared):
    nearest, shuffled, none = (
        dataset(prepared, read_neighbours=kind).batch(np.arange(4)) for kind in Neighbours
    )
    assert (nearest["tokens"] == shuffled["tokens"]).all()
    different = (nearest["encoder_tokens"] != shuffled["encoder_tokens"]).mean()
    assert different > 0.5 and not none["encoder_segment_ids"].any()
    fewer = dataset(prepared, num_neighbours=1).batch(np.arange(4))["encoder_tokens"]
    blocks = nearest["encoder_tokens"].reshape(4, 4, NEIGHBOURS, LENGTH)
    assert (fewer.reshape(4, 4, LENGTH) == blocks[:, :, 0]).all()


def test_bad_neighbours_are_refused_with_both_values(prepared, tmp_path):
    corpus, config = prepared
    with pytest.raises(ValueError, match="another chunk_length: 4, and here it is 8"):
        dataset(prepared, chunk_length=8)
    with pytest.raises(ValueError, match=r"num_neighbours=3: .* has 2 of each"):
        dataset(prepared, num_neighbours=3)
    with pytest.raises(ValueError, match=r"no neighbours in .*run `maxmeg neighbours`"):
        dataset(prepared, neighbours=str(tmp_path))
    folder = str(folder_of(config))
    other = IndexedDataset(write(tmp_path, documents=41))
    hashes = [split_chunks(of, SPLIT, 0, CHUNK).identity for of in (corpus, other)]
    text = f"another database: {hashes[0]}, and here it is {hashes[1]}: run"
    with pytest.raises(ValueError, match=text):
        dataset((other, config), neighbours=folder)
    assert find(corpus.prefix) == config  # the index is there
    with pytest.raises(ValueError, match=r"letters.*words.*build the index again"):
        find(corpus.prefix, encoder="words")
    with pytest.raises(ValueError, match=f"{hashes[0]}.*{hashes[1]}"):
        find(other.prefix, neighbours=folder)
    assert settings(corpus.prefix).source_tokens == 4 * NEIGHBOURS * LENGTH


def test_the_command_embeds_chunks_by_a_model(tmp_path, capsys):
    prefix = write(tmp_path, documents=12)
    fields = {"attention.causal": False, "max_position": 64, "dtype": DType.bfloat16}
    run = make_run(tmp_path / "encoder", **fields)
    config = retro.get_config()
    config.data, config.run_dir = settings(prefix), str(tmp_path / "run")
    neighbours.main(config, options.Neighbours(encoder=str(run)))
    assert "neighbours of each of" in capsys.readouterr().out
    data = RetroDataset(IndexedDataset(prefix), SPLIT, 0, config.data, TOKENIZER, 0)
    assert data.batch(np.arange(2))["encoder_segment_ids"].any()
    with pytest.raises(ValueError, match="encoder"):
        neighbours.main(config, options.Neighbours(encoder=str(run), pooling="first"))
