"""Weights of documents: from rows to PREFIX.weights.npy, and from there to the loss of targets."""

import collections
import json
import logging
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from maxmeg.config.data import DataConfig, DataOrder, Objective, Packing
from maxmeg.data.build import build_dataset, open_corpus
from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter
from maxmeg.data.corpus.vocabulary import write_vocabulary
from maxmeg.data.resuming import record_order, warn_of_order
from maxmeg.data.samples.gpt import permuted_weights
from maxmeg.preprocess import main

LENGTH = 8
SIZES = [3, 0, 1, 9, 20, 2, 5, 9, 30, 4, 17, 6]
WEIGHTS = np.float32([2, 0.5, 3, 0, 1, 0.25, 1000, 0, 1, 7, 0, 4])
ROWS = [{"text": "a", "weight": 2}, {"text": "b"}, {"text": "c", "weight": None}]
ROWS += [{"text": "d", "weight": 0}, {"text": "e", "weight": 1e-6}]
EOD = 256  # of the tokenizer of bytes
END = 999  # of the tokenizer null:1000


def write_rows(path, rows) -> str:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_rows_of_every_format_have_weights(tmp_path, capsys, suffix):
    output = f"--output={tmp_path}/c", "--workers=0"
    prefix, file = f"{tmp_path}/c_text_document", tmp_path / "c_text_document.weights.npy"
    assert main([f"--input={write_rows(tmp_path / f'a{suffix}', ROWS)}", *output]) == 0
    assert f"wrote {prefix}.bin, .idx and .weights.npy" in capsys.readouterr().out
    weights = np.load(file)
    assert weights.dtype == np.float32 and weights.tolist() == [2, 1, 1, 0, np.float32(1e-6)]
    assert main(["inspect", prefix]) == 0
    shown = capsys.readouterr().out
    assert "3 of 5 documents have another weight in the loss than 1, from 0 to 2" in shown
    assert "tokens: 20 % have weight 0, 20 % less than 1, 40 % 1, 20 % more than 1" in shown
    source = write_rows(tmp_path / f"b{suffix}", [row | {"weight": 1} for row in ROWS])
    assert main([f"--input={source}", *output]) == 0
    assert f"wrote {prefix}.bin and .idx" in capsys.readouterr().out and not file.exists()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_key_of_texts_may_be_called_weight(tmp_path, suffix):
    source = write_rows(tmp_path / f"a{suffix}", [{"text": "a", "weight": "heavy"}])
    flags = f"--input={source}", f"--output={tmp_path}/c", "--workers=0", "--json_keys"
    assert main([*flags, "text", "weight"]) == 0
    assert not list(tmp_path.glob("*.npy"))


@pytest.mark.parametrize("weight", [-1, 1001, 1e-7, float("nan"), True, "2"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_weight_that_is_no_weight_is_named_with_its_row(tmp_path, capsys, suffix, weight):
    rows = [{"text": "a", "weight": None}, {"text": "b", "weight": weight}]
    source = write_rows(tmp_path / f"a{suffix}", rows)
    flags = f"--input={source}", f"--output={tmp_path}/c", "--workers=0"
    assert main(flags) == 2
    place = "line 2" if suffix == ".jsonl" else "row 2"
    wanted = f"{source} {place}: weight={weight!r} must be 0, or a number from 1e-06 to 1000"
    assert wanted in capsys.readouterr().err and not list(tmp_path.glob("c*"))
    assert main([*flags, "--skip_bad_lines"]) == 0


WRONG = {
    "of another corpus": (np.ones(11, np.float32), r"float32 \[11\], not float32 \[12\]"),
    "float64": (np.ones(12), r"float64 \[12\], not float32"),
    "negative": (np.full(12, -1, np.float32), "document 0: -1.0 must be 0, or a number from"),
    "NaN": (np.append(np.ones(11, "f4"), np.float32("nan")), "document 11: nan must be 0"),
    "no array": (b"weights", "is no array of NumPy"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_of_weights_is_named_with_the_remedy(corpus, case):
    content, message = WRONG[case]
    if isinstance(content, bytes):
        Path(f"{corpus}.weights.npy").write_bytes(content)
    else:
        np.save(f"{corpus}.weights.npy", content)
    with pytest.raises(ValueError, match=f"weights.npy.* {message}.*delete this file"):
        IndexedDataset(corpus)


@pytest.fixture
def corpus(tmp_path) -> str:
    """Documents of several sequences; the tokens of a document are its number, and an end."""
    return write_numbers(str(tmp_path / "a"), 0)


def write_numbers(prefix: str, first: int) -> str:
    with IndexedWriter(prefix, 1000) as writer:
        for number, size in enumerate(SIZES, first):
            lengths = [size // 3, size - size // 3 + 1] if size else []
            writer.add_document([number] * size + [END] * (size > 0), lengths)
    write_vocabulary(prefix, "null:1000")
    return prefix


def settings(*paths: str, **changes) -> DataConfig:
    data = DataConfig(paths=paths, split="1,0,0", tokenizer="null:1000", sequence_length=LENGTH)
    for name, value in changes.items():
        setattr(data, name, value)
    return data


def opened(data: DataConfig, seed: int = 3, split: int = 0):
    tokenizer, prefixes = open_corpus(data, "unused")
    dataset = build_dataset(data, prefixes, tokenizer, split, seed)
    assert dataset is not None
    return dataset


def epoch(data) -> dict[str, np.ndarray]:
    return data.batch(np.arange(data.samples_per_epoch))


READ = {
    "native": {"order": DataOrder.native},
    "Megatron's order": {"order": DataOrder.megatron},
    "segments": {"reset_attention_mask": True, "eod_mask_loss": True},
    "a part": {"split": "2,3,1", "order": DataOrder.native},
    **{packing.value: {"packing": packing} for packing in Packing if packing is not Packing.none},
}


@pytest.mark.parametrize("case", READ)
def test_a_target_has_the_weight_of_its_document(corpus, tmp_path, case):
    """Beside a corpus without weights, whose targets have weight 1; all else is as without."""
    other = write_numbers(str(tmp_path / "b"), 100)
    blend = ("0.5", corpus, "0.5", other) if case in ("native", "segments") else (corpus, other)
    data, split = settings(*blend, **READ[case]), int(case == "a part")
    before = epoch(opened(data, split=split))
    np.save(f"{corpus}.weights.npy", np.ones(len(SIZES), np.float32))
    same = epoch(opened(data, split=split))
    assert all(same[name].tobytes() == array.tobytes() for name, array in before.items())
    np.save(f"{corpus}.weights.npy", WEIGHTS)
    after = epoch(opened(data, split=split))
    mask, wanted = before.pop("loss_mask"), np.append(WEIGHTS, np.ones(988, np.float32))
    numbers = np.where(before["targets"] == END, before["tokens"], before["targets"])
    assert np.array_equal(after["loss_mask"], mask * wanted[numbers])
    assert after["loss_mask"].dtype == np.float32
    assert all(np.array_equal(after[name], array) for name, array in before.items())


@pytest.mark.parametrize("packing", [Packing.best_fit, Packing.greedy])
def test_a_document_of_weight_n_counts_as_n_documents(make_corpus, packing):
    """Each fills one sample, so the sums of weights by context and target give the gradient."""
    documents, counts = [np.arange(i, i + LENGTH + 1) for i in (0, 50, 80)], [1, 3, 2]
    once, copies = make_corpus(documents), []
    np.save(f"{once}.weights.npy", np.float32(counts))
    for document, count in zip(documents, counts, strict=True):
        copies += [document] * count
    sums = []
    for prefix in (once, make_corpus(copies, "copies")):
        batch, found = epoch(opened(settings(prefix, packing=packing))), collections.Counter()
        for row, at in np.argwhere(batch["loss_mask"]).tolist():
            context = tuple(batch["tokens"][row, : at + 1].tolist())
            found[context, batch["targets"][row, at]] += batch["loss_mask"][row, at]
        sums.append(found)
    assert sums[0] == sums[1] and {*sums[0].values()} == {1, 2, 3}


def test_fill_in_the_middle_keeps_the_weights_of_documents(make_corpus):
    """Also where a sample begins or ends with an end of a document."""
    sizes = [5, 3, 0, 30, 7, 16, 2, 0, 0, 11, 64, 1, 1, 23]
    weights = np.float32(np.arange(len(sizes)) + 2)
    documents = [[97 + i] * size + [EOD] for i, size in enumerate(sizes)]
    prefix, fill = make_corpus(documents), {"fim_tokens": ("257", "258", "259", "260")}
    np.save(f"{prefix}.weights.npy", weights)
    data = settings(prefix, tokenizer="bytes", fim_rate=0.7, **fill)
    tokenizer, prefixes = open_corpus(data, "unused")
    seen = set()
    for length in (12, 31):
        data.sequence_length = length
        dataset = build_dataset(data, prefixes, tokenizer, 0, 3, 300)
        assert dataset is not None
        batch = dataset.batch(np.arange(60))
        for targets, mask in zip(batch["targets"], batch["loss_mask"], strict=True):
            ends = np.flatnonzero(targets == EOD) + 1
            parts = zip(np.split(targets, ends), np.split(mask, ends), strict=True)
            for ids, here in parts:
                letters = {*ids[(ids >= 97) & (ids < 123)].tolist()}
                assert len(letters) < 2
                for letter in letters:  # also of sentinels and the end
                    assert {*here.tolist()} - {0.0} == {weights[letter - 97]}
                seen |= letters
    assert len(seen) == 11
    np.save(f"{prefix}.weights.npy", weights[: len(sizes)])
    without = make_corpus([[97 + i] * 9 for i in range(9)], "without")
    np.save(f"{without}.weights.npy", np.float32(range(9)))
    data.paths = (without,)
    with pytest.raises(ValueError, match=r"end-of-document token after .*append_eod"):
        build_dataset(data, [without], tokenizer, 0, 3, 300).batch(np.arange(9))


def test_sentinels_after_the_last_end_have_the_weight_of_the_document_before():
    text, permuted = np.array([[97, EOD, EOD, 98, EOD]]), np.array([[97, EOD, 98, EOD, 257]])
    weights = np.float32([[1, 1, 2, 3, 3]])
    assert permuted_weights(weights, text, permuted, EOD).tolist() == [[1, 1, 3, 3, 3]]


def test_targets_of_pairs_have_the_weight_of_their_row(make_corpus):
    sources, targets = (
        make_corpus([[10 * add + i] * 3 for i in range(4)], name)
        for add, name in ((1, "sources"), (2, "targets"))
    )
    data = settings(sources, targets, objective=Objective.seq2seq, source_length=LENGTH)
    for path in (sources, targets):
        np.save(f"{path}.weights.npy", np.float32([3, 0, 1, 0.5]))
    batch = epoch(opened(data))
    for row, weight in zip(batch["targets"], batch["loss_mask"], strict=True):
        expected = [3, 0, 1, 0.5][row[0] - 20]
        assert weight.tolist() == [expected] * 4 + [0] * 4
    np.save(f"{sources}.weights.npy", np.float32([3, 0, 2, 0.5]))
    with pytest.raises(
        ValueError, match=r"pair 2 has weight 2.0 in .*sources and 1.0 in .*--align"
    ):
        opened(data)


@pytest.mark.parametrize(
    "objective",
    [Objective.masked, Objective.span_corruption, Objective.ict, Objective.retro],
)
def test_objectives_that_do_not_read_weights_refuse_them(corpus, objective):
    np.save(f"{corpus}.weights.npy", WEIGHTS)
    data = settings(corpus, objective=objective)
    with pytest.raises(ValueError, match=rf"objective={objective.value} does not read .*npy, only"):
        opened(data)


@pytest.mark.parametrize("case", ["native", "best_fit", "pairs"])
def test_a_train_split_without_a_loss_is_refused(corpus, caplog, case):
    """Another split is warned of."""
    pairs = {"objective": Objective.seq2seq, "source_length": LENGTH}
    paths = (corpus,) * (1 + (case == "pairs"))
    data = settings(*paths, **(pairs if case == "pairs" else READ[case]))
    data.split = "1,1,0"
    caplog.set_level(logging.WARNING, "maxmeg")
    for weighted in ([], [len(SIZES) - 1]):
        np.save(f"{corpus}.weights.npy", np.float32(np.isin(np.arange(len(SIZES)), weighted)))
        with pytest.raises(ValueError, match=r"all .* train split of .*a have weight 0 .*npy\)"):
            opened(data)
    np.save(f"{corpus}.weights.npy", np.float32(np.arange(len(SIZES)) == 0))
    opened(data)
    assert not caplog.records
    opened(data, split=1)
    assert "all documents of the validation split" in caplog.text


@pytest.mark.parametrize("case", ["native", "best_fit", "pairs"])
def test_changed_weights_are_noticed_on_resumption(corpus, caplog, case):
    pairs = {"objective": Objective.seq2seq, "source_length": LENGTH}
    paths = (corpus,) * (1 + (case == "pairs"))
    data, consumed = settings(*paths, **(pairs if case == "pairs" else READ[case])), 4
    caplog.set_level(logging.WARNING, "maxmeg")  # runs of other tests lower it
    saved = record_order(opened(data), consumed)
    warn_of_order(saved, opened(data), consumed)
    for weights in (WEIGHTS, WEIGHTS[::-1]):
        np.save(f"{corpus}.weights.npy", weights)
        warn_of_order(saved, opened(data), consumed)
        (record,) = caplog.records
        assert record.message.startswith("the weights of documents (PREFIX.weights.npy) are not")
        caplog.clear()
        saved = json.loads(json.dumps(record_order(opened(data), consumed)))
        warn_of_order(saved, opened(data), consumed)
        assert not caplog.records
    warn_of_order(saved, opened(data, seed=7), consumed)
    assert "changed: seed)" in caplog.text
