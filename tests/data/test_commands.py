"""The subcommands of maxmeg.preprocess: what they print, write and return."""

from pathlib import Path

import pytest

from maxmeg import preprocess
from maxmeg.data.indexed import IndexedDataset, IndexedWriter


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
    assert "verified, all agree" in shown and Path(f"{tmp_path}/r.html").is_file()
    assert preprocess.main(["inspect", prefix, "--vocab_size=100"]) == 1
    assert "problem: " in capsys.readouterr().out
    assert preprocess.main(["inspect", f"{tmp_path}/none", prefix]) == 1
    shown = capsys.readouterr()
    assert "none.idx does not exist" in shown.err and "18 tokens" in shown.out
    assert preprocess.main(["inspect", prefix, "--report=x.svg"]) == 1
    assert "must end in .png or .html" in capsys.readouterr().err


def test_a_run_is_inspected(prefix, tmp_path, capsys):
    config = Path(preprocess.__file__).parents[1] / "configs" / "gpt.py"
    run = [f"--config={config}", f"--config.data.paths={prefix}", "--config.data.split=1,0,0"]
    run += [f"--config.run_dir={tmp_path}/run", "--config.data.sequence_length=8"]
    report = tmp_path / "r.html"
    assert preprocess.main(["inspect", *run, f"--report={report}"]) == 0
    shown = capsys.readouterr().out
    assert "train                                         2                 18" in shown
    assert "\nfirst text" in shown  # by the run's own tokenizer
    assert "samples read" in report.read_text()
    assert preprocess.main(["inspect", *run, "--config.data.split=0,1,0"]) == 1
    assert "leaves no sequence for train" in capsys.readouterr().err
    assert preprocess.main(["inspect", *run, "--config.data.pats=x"]) == 1
    assert "did you mean" in capsys.readouterr().err
    for flags in ([], [prefix, "--config.data.split=1,0,0"]):
        with pytest.raises(SystemExit):
            preprocess.main(["inspect", *flags])
        assert "--config=FILE.py" in capsys.readouterr().err


def test_corpora_are_merged_and_verified(prefix, tmp_path, capsys):
    output = f"--output={tmp_path}/m"
    assert preprocess.main(["merge", prefix, f"{prefix}.idx", output]) == 0
    assert "2 datasets (2 verified by checksums): 4 documents, 36 tokens" in capsys.readouterr().out
    assert IndexedDataset(tmp_path / "m").num_documents == 4
    assert preprocess.main(["verify", f"{tmp_path}/m", prefix]) == 0
    assert capsys.readouterr().out.count("agree with their checksums") == 2
    Path(f"{prefix}.bin").write_bytes(bytes(36))
    assert preprocess.main(["verify", f"{tmp_path}/m", prefix]) == 1
    shown = capsys.readouterr()
    assert "c_text_document.bin differs" in shown.err and "m: .bin and .idx agree" in shown.out
    assert preprocess.main(["merge", prefix, output]) == 1
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


@pytest.mark.parametrize("name", ["inspect", "merge", "verify"])
def test_wrong_flags_are_explained(name, capsys):
    for flags in ([], ["x", "--nonsense"]):
        with pytest.raises(SystemExit) as stopped:
            preprocess.main([name, *flags])
        assert stopped.value.code == 2
        assert f"usage: maxmeg.preprocess {name}" in capsys.readouterr().err
