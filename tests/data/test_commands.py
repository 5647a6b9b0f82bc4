"""The subcommands of maxmeg.preprocess: what they print, write and return."""

import gzip
import re
from pathlib import Path

import pytest

from maxmeg import preprocess
from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter


@pytest.fixture
def prefix(tmp_path, write_lines) -> str:
    source = write_lines(["first text", "second"])
    flags = [f"--input={source}", f"--output={tmp_path}/c", "--append_eod", "--workers=0"]
    assert preprocess.main(flags) == 0
    return f"{tmp_path}/c_text_document"


def test_a_corpus_is_inspected(prefix, tmp_path, capsys):
    report = f"--report={tmp_path}/r.html"
    assert preprocess.main(["inspect", prefix, "--tokenizer=bytes", "--verify", report]) == 0
    shown = capsys.readouterr().out
    assert "18 tokens of uint16" in shown and "\nfirst text\n" in shown
    assert "verified, all match" in shown and Path(f"{tmp_path}/r.html").is_file()
    assert preprocess.main(["inspect", prefix, "--vocab_size=100"]) == 1
    assert "problem: " in capsys.readouterr().out
    assert preprocess.main(["inspect", f"{tmp_path}/none", prefix]) == 2
    shown = capsys.readouterr()
    assert "none.idx does not exist" in shown.err and "18 tokens" in shown.out
    assert preprocess.main(["inspect", prefix, "--report=x.svg"]) == 2
    assert "must end in .html" in capsys.readouterr().err


def test_a_run_is_inspected(prefix, tmp_path, capsys):
    run = ["--config=gpt", f"--data.paths={prefix}", "--config.data.split=1,0,0"]
    run += [f"--run_dir={tmp_path}/run", "--data.sequence_length=8"]
    report = tmp_path / "r.html"
    assert preprocess.main(["inspect", *run]) == 2
    assert "2,845 times, more than data.max_epochs=1000" in capsys.readouterr().err
    run += ["--data.max_epochs=0"]
    assert preprocess.main(["inspect", *run, f"--report={report}"]) == 0
    shown = capsys.readouterr().out
    assert re.search("^train +2 +18 ", shown, re.MULTILINE)
    assert "\nfirst text" in shown  # by the run's own tokenizer
    assert "samples read" in report.read_text()
    assert preprocess.main(["inspect", *run, "--config.data.split=0,1,0"]) == 2
    assert "leaves no sequence for train" in capsys.readouterr().err
    assert preprocess.main(["inspect", *run, "--config.data.pats=x"]) == 2
    assert "did you mean" in capsys.readouterr().err
    for flags in ([], [prefix, "--config.data.split=1,0,0"]):
        assert preprocess.main(["inspect", *flags]) == 2
        assert "--config=NAME" in capsys.readouterr().err


def test_corpora_are_merged_and_verified(prefix, tmp_path, capsys):
    output = f"--output={tmp_path}/m"
    assert preprocess.main(["merge", prefix, f"{prefix}.idx", output]) == 0
    assert "2 datasets (2 verified by checksums): 4 documents, 36 tokens" in capsys.readouterr().out
    assert IndexedDataset(tmp_path / "m").num_documents == 4
    assert preprocess.main(["verify", f"{tmp_path}/m", prefix]) == 0
    assert capsys.readouterr().out.count("match their checksums") == 2
    Path(f"{prefix}.bin").write_bytes(bytes(36))
    assert preprocess.main(["verify", f"{tmp_path}/m", prefix]) == 1
    shown = capsys.readouterr()
    assert "c_text_document.bin differs" in shown.err and "m: .bin and .idx match" in shown.out
    assert preprocess.main(["merge", prefix, output]) == 2
    assert IndexedDataset(tmp_path / "m").num_documents == 4


def test_checksums_are_left_out_and_made_later(tmp_path, write_lines, capsys):
    source = write_lines(["text"])
    flags = [f"--input={source}", f"--output={tmp_path}/c", "--workers=0", "--no_checksums"]
    assert preprocess.main(flags) == 0
    prefix, sums = f"{tmp_path}/c_text_document", Path(f"{tmp_path}/c_text_document.sums")
    assert not sums.exists()
    assert preprocess.main(["verify", prefix]) == 1
    assert "verify --create" in capsys.readouterr().err and not sums.exists()
    assert preprocess.main(["verify", "--create", prefix]) == 0
    assert preprocess.main(["verify", prefix]) == 0
    Path(f"{prefix}.idx").write_bytes(b"damaged")
    before = sums.read_bytes()
    assert preprocess.main(["verify", "--create", prefix]) == 1  # no fresh sums over damage
    assert sums.read_bytes() == before


def test_an_interrupted_merge_writes_nothing(prefix, tmp_path, capsys, monkeypatch):
    def interrupt(writer, dataset):
        raise KeyboardInterrupt

    monkeypatch.setattr(IndexedWriter, "add_dataset", interrupt)
    assert preprocess.main(["merge", prefix, f"--output={tmp_path}/m"]) == 130
    assert "interrupted" in capsys.readouterr().err and not list(tmp_path.glob("m*"))


MODELS = {"bpe": "t/tokenizer.json", "wordpiece": "t/vocab.txt", "unigram": "t.model"}


@pytest.mark.parametrize("model", MODELS)
def test_a_tokenizer_is_trained(tmp_path, capsys, write_lines, model):
    """Of lines and texts as preprocess reads them, with which it then works."""
    words = [chr(97 + i) + "oxes" for i in range(20)]
    source = write_lines([f"the {word} jump over {word[1:]}s {i}" for i, word in enumerate(words)])
    packed = tmp_path / "more.txt.gz"
    packed.write_bytes(gzip.compress(b"the end"))
    size = 295 if model != "wordpiece" else 90
    command = ["train-tokenizer", f"--model={model}", f"--vocab_size={size}", "--input"]
    command += [source, str(packed), f"--output={tmp_path / MODELS[model]}"]
    assert preprocess.main(command) == 0
    shown = capsys.readouterr().out
    assert f"{model} from 20 texts, 0.0 MB: {size} tokens, eod=" in shown
    assert "bytes per token on 1 held-out texts" in shown
    tokenizer = shown.rpartition("--tokenizer=")[2].strip()
    run = [f"--input={source}", f"--output={tmp_path}/c", f"--tokenizer={tokenizer}", "--workers=0"]
    assert preprocess.main(run) == 0
    assert "20 documents" in capsys.readouterr().out
    with open(source, "a") as file:
        file.write("{}\n")
    assert preprocess.main(command) == 2
    assert f"{source} line 21: no 'text'" in capsys.readouterr().err
    assert preprocess.main([*command, "--skip_bad_lines"]) == 0
    assert "1 bad lines left out" in capsys.readouterr().out
    assert preprocess.main([*command, "--max_mb=0.0001"]) == (2 if model == "unigram" else 0)


def test_what_cannot_be_trained_is_explained(tmp_path, capsys, write_lines):
    source = write_lines(["some text"])
    command = ["train-tokenizer", f"--input={source}", f"--output={tmp_path}/tokenizer.json"]
    command += ["--model=bpe", "--vocab_size=300"]
    for words, message in (
        ([f"--input={tmp_path}/none"], "none does not exist and matches no file"),
        (["--max_mb=-1"], "max_mb=-1.0 must be positive"),
        (["--model=wordpiece", "--input=-"], "which is impossible for -"),
    ):
        assert preprocess.main([*command, *words]) == 2
        assert message in capsys.readouterr().err
    assert preprocess.main([*command, "--vocabsize=9"]) == 2
    assert "did you mean --vocab_size?" in capsys.readouterr().err


def test_placeholders_are_tokens_where_they_are_asked_for(tmp_path, capsys, write_lines):
    source = write_lines(["a<image>b<|end|>"])
    command = [f"--input={source}", f"--output={tmp_path}/c", "--workers=0"]
    command += ["--tokenizer=bytes?special_tokens=<image>,<|end|>"]
    for words, tokens in (
        ([], [*b"a<image>b<|end|>"]),
        (["--placeholders", "<image>"], [*b"a", 257, *b"b<|end|>"]),
        (["--placeholders", "<image>", "<|end|>"], [*b"a", 257, *b"b", 258]),
    ):
        assert preprocess.main([*command, *words]) == 0
        assert IndexedDataset(f"{tmp_path}/c_text_document").get(0).tolist() == tokens
    capsys.readouterr()
    assert preprocess.main([*command, "--placeholders", "<img>"]) == 2
    assert "'<img>' is not a token of bytes?special" in capsys.readouterr().err
