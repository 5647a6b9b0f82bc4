"""Labelled files: the published layouts, what is refused, and the rows that they become."""

import json

import numpy as np
import pytest

from maxmeg.config.data import DataConfig, Objective, Scored, TooLong
from maxmeg.config.labelled import Format
from maxmeg.data.labelled.dataset import open_labelled
from maxmeg.data.labelled.files import read_examples
from maxmeg.data.loader import eval_batches
from maxmeg.data.opening import Opening
from maxmeg.data.tokenizers.load import load_tokenizer

CLASSIFY, TAG, CHOOSE = Objective.classify, Objective.tag, Objective.choose
MNLI = "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse "
MNLI += "sentence2_parse sentence1 sentence2 label1 gold_label"
PUBLISHED = {  # format: header line, a row, (texts, class) or None
    "cola": ("", "gj04\t0\t*\tThey drank.", (("They drank.", ""), 0)),
    "sst2": ("sentence\tlabel", "a gem \t1", (("a gem ", ""), 1)),
    "mrpc": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", '1\t7\t8\tx "y\ty', (('x "y', "y"), 1)),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "9\t1\t2\tWhy?\tHow?\t0",
        (("Why?", "How?"), 0),
    ),
    "mnli": (
        MNLI.replace(" ", "\t"),
        "1\t2\t3\tg\t(a)\t(b)\tp\tq\ta\tb\tneutral\tentailment",
        (("a", "b"), 1),
    ),
    "snli": (MNLI.replace(" ", "\t"), "1\t2\t3\tg\t(a)\t(b)\tp\tq\ta\tb\tneutral\t-", None),
    "qnli": ("index\tquestion\tsentence\tlabel", "0\tq\ts\tnot_entailment", (("q", "s"), 1)),
    "rte": ("index\tsentence1\tsentence2\tlabel", "0\tq\ts\tentailment", (("q", "s"), 0)),
    "wnli": ("index\tsentence1\tsentence2\tlabel", "0\tq\ts\t1", (("q", "s"), 1)),
}


def settings(objective: Objective = CLASSIFY, **values) -> DataConfig:
    return DataConfig(**{"objective": objective, "sequence_length": 16, **values})


def rows_of(tmp_path, text: str, name: str = "a.tsv", **values) -> list:
    if name != ".":
        (tmp_path / name).write_text(text)
    return read_examples(settings(**values), str(tmp_path / name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tables(tmp_path, name):
    header, row, wanted = PUBLISHED[name]
    lines = [header] * bool(header) + [row]
    if wanted is None:
        lines.append(row.replace("-", "neutral"))
        wanted = (("a", "b"), 2)
    (example,) = rows_of(tmp_path, "\r\n".join(lines) + "\n", format=Format[name])
    assert (*example[1], example[2]) == wanted


def test_lines_of_other_columns_are_counted_and_many_refused(tmp_path, caplog):
    header, row, _ = PUBLISHED["qqp"]
    text = "\n".join([header, *[row] * 150, "10\t1\tbroken"])
    assert len(rows_of(tmp_path, text, format=Format.qqp)) == 150
    assert "left out 1 lines of another number of columns, first line 152" in caplog.text
    with pytest.raises(ValueError, match=r"a.tsv: 3 of 4 lines, first line 3, have not the 6 col"):
        rows_of(tmp_path, "\n".join([header, row, *["x"] * 3]), format=Format.qqp)


def test_race(tmp_path):
    passage = {"article": "It rains.", "answers": ["B", "A"], "id": "x"}
    passage |= {"questions": ["It _ .", "What?"], "options": [["snows", "rains"], ["a", "b", "c"]]}
    (tmp_path / "high").mkdir()
    (tmp_path / "high" / "1.txt").write_text(json.dumps(passage))
    first, second = read_examples(settings(CHOOSE, format=Format.race), str(tmp_path))
    assert first.texts == (("It snows .", "It rains."), ("It rains .", "It rains."))
    assert (first.label, second.label) == (1, 0)
    assert second.texts[2] == ("What? c", "It rains.")
    passage["answers"] = ["B", "E"]
    (tmp_path / "high" / "1.txt").write_text(json.dumps(passage))
    with pytest.raises(ValueError, match=r"1.txt, line 1: label='E' is none of its 3 choices"):
        read_examples(settings(CHOOSE, format=Format.race), str(tmp_path))


def test_words(tmp_path):
    text = "-DOCSTART- X\n\nEU NNP B-ORG\nsays VBZ O\n\nNo DT O\n"
    labels = ("O", "B-ORG")
    found = rows_of(tmp_path, text, "a.conll", objective=TAG, labels=labels)
    assert [row[1:] for row in found] == [(("EU", "says"), (1, 0)), (("No",), (0,))]
    with pytest.raises(ValueError, match=r"line 3: label 'B-ORG' is none of the classes O, X"):
        rows_of(tmp_path, text, "a.conll", objective=TAG, labels=("O", "X"))


BAD = [
    ("a.jsonl", '{"text": "a", "label": 2}', {}, "line 1: label 2 is none of the classes no, yes"),
    ("a.json", '[{"text": "a", "label": 2}]', {}, "row 1: label 2 is none of the classes no, yes"),
    ("a.jsonl", '{"text": "a", "label": true}', {}, "label must be a str/int, and is True"),
    ("a.jsonl", '{"text": " ", "label": "no"}', {}, "text is empty"),
    ("a.jsonl", '{"txt": "a", "label": 0}', {}, "text must be a str, and is missing; it has txt"),
    ("a.jsonl", "[1]", {}, "is a list, no object"),
    ("a.tsv", "text\tlabel\na\tmaybe", {}, "line 2: label 'maybe' is none of the classes no, yes"),
    ("a.tsv", "text\ttag\na\tno", {}, "has no column label"),
    ("a.tsv", "text\ttext\na\tno", {}, "names text twice"),
    ("a.tsv", "text\tlabel\n", {}, "holds no row"),
    (".", "", {}, "is a folder without Parquet files, and no saved dataset: name its files"),
    ("a.txt", "a", {}, "data.format=suffix knows .tsv"),
    ("a.conll", "a b", {}, "is a conll file, for data.objective=tag, not classify"),
]


@pytest.mark.parametrize(("name", "text", "values", "message"), BAD)
def test_bad_rows_are_named(tmp_path, name, text, values, message):
    columns = {} if name != "a.tsv" else {"columns": ("text", "label")}
    with pytest.raises(ValueError, match=message.replace("/", ".")):
        rows_of(tmp_path, text, name, labels=("no", "yes"), **columns, **values)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d", "e", "f", "##g"]
    (folder / "vocab.txt").write_text("\n".join(words))
    return load_tokenizer(f"wordpiece:{folder}/vocab.txt")


def opened(tmp_path, tokenizer, rows: list[dict], index: int = 1, size: int = 0, **values):
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    config = settings(**{"labels": ("no", "yes"), **values})
    split, num_ids = ",".join(str(int(i == index)) for i in range(3)), size or tokenizer.vocab_size
    return open_labelled(
        Opening(config, [str(tmp_path / "a.json")], split, index, tokenizer, num_ids)
    )


def test_rows(tmp_path, tokenizer):
    pair = {"text": "a b", "text_pair": "c", "label": "yes"}
    batch = opened(tmp_path, tokenizer, [pair]).batch(np.arange(1))
    names = ("tokens", "token_types", "segment_ids", "positions", "loss_mask", "targets")
    assert {name: batch[name][0, :7].tolist() for name in names} == {
        "tokens": [2, 5, 6, 3, 7, 3, 0],
        "token_types": [0, 0, 0, 0, 1, 1, 0],
        "segment_ids": [1, 1, 1, 1, 1, 1, 0],
        "positions": [0, 1, 2, 3, 4, 5, 0],
        "loss_mask": [1, 0, 0, 0, 0, 0, 0],
        "targets": [1, 0, 0, 0, 0, 0, 0],
    }
    with pytest.raises(ValueError, match=r"a\.json: id 7 is not in the vocabulary \[0, 7\)"):
        opened(tmp_path, tokenizer, [pair], size=7)
    last = opened(tmp_path, tokenizer, [pair], scored=Scored.last).batch(np.arange(1))
    assert last["loss_mask"][0].nonzero()[0].tolist() == [5]
    row = {"tokens": ["ag", "b"], "labels": ["yes", "no"]}
    words = opened(tmp_path, tokenizer, [row], objective=TAG).batch(np.arange(1))
    assert words["tokens"][0, :5].tolist() == [2, 5, 11, 6, 3]
    assert words["loss_mask"][0, :5].tolist() == [0, 1, 0, 1, 0]
    assert words["targets"][0, :5].tolist() == [0, 1, 0, 0, 0]
    row = {"context": "e", "question": "a", "choices": ["b", "c"], "label": 1}
    choices = opened(tmp_path, tokenizer, [row], objective=CHOOSE, labels=()).batch(np.arange(1))
    assert choices["tokens"][0, :12].tolist() == [2, 5, 6, 3, 9, 3, 2, 5, 7, 3, 9, 3]
    assert choices["targets"][0].nonzero()[0].tolist() == [0, 6]
    assert choices["loss_mask"][0].nonzero()[0].tolist() == [6]
    assert choices["positions"][0, 6:9].tolist() == [0, 1, 2]


def test_what_is_too_long(tmp_path, tokenizer):
    """Dropped in training alone, or cut: of a pair the longer text."""
    long = {"text": "a " * 20, "text_pair": "b " * 3, "label": 0}
    short = {"text": "a", "label": 1}
    assert opened(tmp_path, tokenizer, [long, short], index=0).samples_per_epoch == 1
    with pytest.raises(ValueError, match=r"a.json row 1: the example is longer than data.sequ"):
        opened(tmp_path, tokenizer, [long, short])
    cut = opened(tmp_path, tokenizer, [long], too_long=TooLong.truncate).batch(np.arange(1))
    assert cut["tokens"][0].tolist() == [2, *[5] * 10, 3, *[6] * 3, 3]
    long["text_pair"] = "b " * 20
    even = opened(tmp_path, tokenizer, [long], too_long=TooLong.truncate).batch(np.arange(1))
    assert even["tokens"][0].tolist() == [2, *[5] * 6, 3, *[6] * 7, 3]


def test_a_whole_set_is_read_once(tmp_path, tokenizer):
    rows = [{"text": "a", "label": n % 2} for n in range(7)]
    data = opened(tmp_path, tokenizer, rows)
    batches = [*eval_batches(data, 0, 4)]
    assert [int(batch["loss_mask"].sum()) for batch in batches] == [4, 3]
    assert batches[1]["loss_mask"].shape == (4, 16)
