"""A biencoder from training to search: it learns, resumes bit for bit, and finds held-out texts."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import short_runs

import maxmeg
from maxmeg import evaluate, preprocess, retrieve
from maxmeg.config.head import Biencoder, two_encoders
from maxmeg.config.model import Position
from maxmeg.config.options import Retrieve
from maxmeg.config.validate import check_settings
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.retrieval.embed import recall
from maxmeg.retrieval.index import Index, faiss_search
from maxmeg.retrieval.passages import open_passages

SLOW = pytest.mark.slow
TOPICS, WORDS = 300, 6
VOCABULARY = [f"{a}{b}" for a in "bcdfghjklmnp" for b in "aeiou"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> dict[str, str]:
    """Settings for a corpus whose documents have six words each: their sentences are alike."""
    folder, random = tmp_path_factory.mktemp("topics"), np.random.default_rng(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *VOCABULARY]
    (folder / "vocab.txt").write_text("\n".join(words))
    documents = []
    for _ in range(TOPICS):
        topic = random.choice(VOCABULARY, WORDS, replace=False)
        sentences = [" ".join(random.choice(topic, 4)).capitalize() + "." for _ in range(5)]
        documents.append({"text": " ".join(sentences)})
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, documents)))
    spec = f"wordpiece:{folder}/vocab.txt"
    flags = [f"--input={folder}/a.jsonl", f"--output={folder}/out", f"--tokenizer={spec}"]
    assert preprocess.main([*flags, "--split_sentences", "--workers=0"]) == 0
    return {"data.paths": f"{folder}/out_text_sentence", "data.tokenizer": spec}


def trained(corpus: dict[str, str], run_dir: Path, **more) -> maxmeg.LanguageModel:
    values = {
        "run_dir": str(run_dir),
        **{"model.num_layers": 1, "model.hidden_size": 64, "model.head.projection": 16},
        **{"data.sequence_length": 40, "data.query_length": 10, "data.split": "8,1,1"},
        **{"train.num_steps": 100, "train.eval_every": 100, "train.eval_steps": 2},
        **{"train.global_batch_size": 16, "train.score_scaling": False, "model.init_std": 0.2},
        **{"optim.lr": 3e-3, "log.every": 1, "checkpoint.save_every": 50},
    }
    return maxmeg.train(maxmeg.config("retrieval", **{**values, **corpus, **more}))


@SLOW
def test_a_run_learns_resumes_and_finds_held_out_texts(corpus, tmp_path, capsys):
    trained(corpus, tmp_path / "whole")
    short_runs.copy_run(tmp_path / "whole", tmp_path / "parts", 50)
    trained(corpus, tmp_path / "parts")
    found = [short_runs.digests(tmp_path / name, 100) for name in ("whole", "parts")]
    assert found[0] == found[1]
    rows = short_runs.curve(tmp_path / "whole")
    accuracies = [row["accuracy"] for row in rows]
    assert np.mean(accuracies[-10:]) > 0.35 > 2 * np.mean(accuracies[:5])  # 1 of 16 by chance
    assert rows[-1]["validation_accuracy"] > 0.25
    capsys.readouterr()
    evaluate.main(evaluate.Options(run_dir=str(tmp_path / "whole"), split="test", batch_size=8))
    assert "test accuracy" in capsys.readouterr().out

    prefix, run_dir = corpus["data.paths"], str(tmp_path / "whole")
    config = maxmeg.load(run_dir).config
    passages = open_passages(prefix, config.data, load_tokenizer(corpus["data.tokenizer"]))
    queries = tmp_path / "queries.jsonl"
    lines = []
    for row in range(len(passages)):
        words = passages.text(row).split(".")
        lines.append(json.dumps({"query": f"{words[1].strip()}.", "row": row}))
    queries.write_text("\n".join(lines))
    options = {"run_dir": run_dir, "corpus": prefix, "count": 20}
    retrieve.main(Retrieve(**options, queries=str(queries), data=2))
    said = capsys.readouterr().out
    assert f"{len(passages)} texts, vectors of 16 numbers" in said
    share = float(said.split("recall@20 ")[1].split(" %")[0])
    assert share > 3 * 100 * 20 / len(passages) > 0
    retrieve.main(Retrieve(**options, query=("Ba be.",), output=str(tmp_path / "found.jsonl")))
    (line,) = (tmp_path / "found.jsonl").read_text().splitlines()
    results = json.loads(line)["results"]
    assert len(results) == 20 and results[0]["score"] >= results[1]["score"]
    with pytest.raises(ValueError, match=r"another encoder.*-vector.*build the index again"):
        retrieve.main(Retrieve(**options, step=50, query=("Ba be.",)))
    with pytest.raises(ValueError, match=r"pooling='mean' is not for .*biencoder=shared: choose v"):
        retrieve.main(Retrieve(**options, pooling="mean"))


def test_recall_counts_own_texts():
    rows = np.array([[3, 1, 2], [0, 2, 1], [5, 4, 0]])
    assert recall(rows, np.array([3, 1, 9]), (1, 3)) == {1: 1 / 3, 3: 2 / 3}


def test_passages_are_texts_with_titles(tmp_path, corpus):
    path, array, table = (tmp_path / f"texts.{kind}" for kind in ("jsonl", "json", "parquet"))
    lines = ['{"text": "Ba be.", "title": "Bi"}', "", '{"text": "Bo."}']
    path.write_text("\n".join(lines))
    array.write_text(f"[{lines[0]},\n {lines[2]}]")
    pq.write_table(pa.table({"text": ["Ba be.", "Bo."], "title": ["Bi", None]}), table)
    config = maxmeg.config("retrieval", **corpus).data
    tokenizer = load_tokenizer(corpus["data.tokenizer"])
    for each in (array, table, path):
        passages = open_passages(str(each), config, tokenizer)
        assert [passages.text(row) for row in range(len(passages))] == ["Bi: Ba be.", "Bo."]
        assert [len(passages.tokens(row)) for row in range(2)] == [3 + 1 + 3, 2 + 2]
    before = passages.hash
    path.write_text("\n".join([*lines, '{"text": 3}']))
    changed = open_passages(str(path), config, tokenizer)
    assert changed.hash != before
    with pytest.raises(ValueError, match=r"texts.jsonl, text 3: the row must be texts, or objects"):
        changed.tokens(2)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no text"):
        open_passages(str(path), config, tokenizer)
    with pytest.raises(ValueError, match=r"vocab.txt is neither a file of rows .* nor the prefix"):
        open_passages(corpus["data.tokenizer"].partition(":")[2], config, tokenizer)


def test_faiss_finds_the_same_rows(tmp_path):
    random = np.random.default_rng(0)
    vectors, queries = (random.standard_normal((n, 8)).astype(np.float32) for n in (50, 6))
    index = Index.create(tmp_path, [vectors], "e", "c")
    try:
        scores, rows = faiss_search(index, queries, 7, "Flat")
    except ImportError as error:
        assert "pip install 'maxmeg[faiss]'" in str(error)
        return
    wanted = index.search(queries, 7)
    np.testing.assert_array_equal(rows, wanted[1])
    np.testing.assert_allclose(scores, wanted[0], rtol=1e-5)
    with pytest.raises(ValueError, match="--faiss=Nonsense"):
        faiss_search(index, queries, 7, "Nonsense")


PROBLEMS = [
    ({"model.attention.causal": True}, r"data.objective=ict cannot train a model with .*causal"),
    ({"model.head.biencoder": Biencoder.none}, "needs a biencoder: set model.head.biencoder=sh"),
    ({"data.objective": "masked"}, r"biencoder=shared replaces .* choose ict, retrieve"),
    ({"model.tied": False}, "model.tied=false has output weights that model.head.biencoder=shared"),
    ({"model.bert.output_bias": True}, "output_bias=True has no effect with model.head.bienc"),
    ({"model.head.num_classes": 2}, "num_classes=2 with biencoder=shared"),
    ({"data.query_length": 315}, "leaves 5 tokens for each, of at least 8: raise sequence_length"),
    ({"train.z_loss": 1.0}, "train.z_loss=1.0 is not for data.objective=ict"),
    ({"data.negatives": 1}, "data.negatives=1 has no effect without data.objective=retrieve"),
    ({"data.objective": "retrieve", "data.paths": ()}, "needs pairs of texts"),
    ({"model.max_position": 200}, r"sequence_length=320 \(texts of 256 tokens\) is longer than"),
]


SEPARATE_PROBLEMS = [
    (
        {"data.separate_queries": False},
        "separate_queries=false does not go with .*=separate: set it to t",
    ),
    ({"model.num_layers": 6}, r"num_layers=6 are not the two encoders .* set layers='3\(enc"),
    ({"model.num_layers": 2, "model.layers": two_encoders(1)}, "num_layers=2 with .*: set it to 4"),
    ({"model.position": Position.rotary}, "model.position=rotary is not supported with head.bienc"),
    (
        {"data.query_length": 300, "model.max_position": 256},
        "query_length=300 is longer than model.max_position=256",
    ),
    ({"model.first_layers_bf16": 1}, "bf16=1 and last_layers_bf16=0 are not supported with head"),
]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        *(("retrieval", *problem) for problem in PROBLEMS),
        *(("retrieval:,separate", *problem) for problem in SEPARATE_PROBLEMS),
    ],
)
def test_bad_settings_are_refused(name, values, message):
    settings = {"data.paths": "sentences", "data.tokenizer": "null:60"}
    with pytest.raises(ValueError, match=message):
        check_settings(maxmeg.config(name, **settings | values))


@SLOW
def test_two_encoders_begin_with_a_bert_and_find_texts(corpus, tmp_path, capsys):
    """The run's steps, its search, and the vectors of both encoders before training and after."""
    shared = {"train.eval_every": 0, "data.sequence_length": 30, **corpus}
    shared |= {"train.global_batch_size": 16, "data.split": "8,1,1"}
    bert = {"model.num_layers": 2, "model.hidden_size": 64, "model.init_std": 0.2}
    bert |= {"train.num_steps": 2, "run_dir": str(tmp_path / "bert")}
    maxmeg.train(maxmeg.config("bert", **bert, **shared))
    own = {"data.query_length": 10, "train.score_scaling": False, "optim.lr": 3e-3}
    distances: list[float] = []
    for steps in (1, 80):
        folder = str(tmp_path / f"{steps}")
        own |= {"train.num_steps": steps, "run_dir": folder, "log.every": 1}
        own |= {"optim.lr": 0.0 if steps == 1 else 3e-3, "optim.min_lr": 0.0}
        own |= {"optim.warmup_fraction": 0.0}
        name = f"retrieval:{tmp_path / 'bert'},separate"
        model = maxmeg.train(maxmeg.config(name, **shared | own))
        one, other = (model.embed(["Ba be."], queries=queries) for queries in (False, True))
        distances.append(np.abs(one - other).max())
    assert distances[0] == 0 < distances[1]
    losses = [row["loss"] for row in short_runs.curve(Path(folder))]
    assert np.mean(losses[-10:]) < np.log(16) < losses[0]  # that of chance
    capsys.readouterr()
    options = {"run_dir": folder, "corpus": corpus["data.paths"], "count": 2}
    retrieve.main(Retrieve(**options, query=("Ba be.",)))
    assert "texts, vectors of 64 numbers" in capsys.readouterr().out
