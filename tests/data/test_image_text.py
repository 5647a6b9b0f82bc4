"""Pairs of images and texts: files become samples; rows that `image-text` refuses."""

import io
import json
import pickle

import numpy as np
import pytest
from PIL import Image

from maxmeg import preprocess
from maxmeg.__main__ import main
from maxmeg.config.data import DataConfig, Objective
from maxmeg.data.build import OPENERS, build_dataset
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.resuming import Difference, compare, record_order
from maxmeg.data.samples.image_text import ImageTextDataset, ImageTokens
from maxmeg.data.tokenizers.load import load_tokenizer

EOD, HOLDER, LENGTH = 256, 33, 12  # HOLDER: "!"


def picture(width: int, height: int) -> tuple[np.ndarray, bytes]:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return pixels, file.getvalue()


def prepare(tmp_path, rows: list[dict], *flags) -> int:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [f"--input={tmp_path}/rows.jsonl", f"--output={tmp_path}/out", f"--images={tmp_path}"]
    return preprocess.main(["image-text", *files, "--tokenizer=bytes", *flags])


def test_rows_become_samples(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(picture(5 + i, 4)[1])
    rows = [{"image": "0.png", "text": "red"}, {"image": "1.png", "caption": "a ! b"}]
    rows.append({"image": "2.png", "text": "x" * 30})
    assert prepare(tmp_path, rows, "--append_eod", "--placeholder=") == 0
    stored = IndexedDataset(tmp_path / "out")
    assert stored.modes is not None and stored.modes.tolist() == [0, 1] * 3
    tokens = ImageTokens(HOLDER, 3, EOD, EOD, 257)
    data = ImageTextDataset(stored, "0,1,0", 1, LENGTH, (4, 6), tokens)
    batch = data.batch(np.arange(3))
    marks = [HOLDER] * 3
    wanted = [
        [*marks, *b"red", EOD],
        [*b"a ", *marks, *b" b", EOD],
        [*marks, *b"x" * (LENGTH - 2)],
    ]
    for row, text in enumerate(wanted):
        size = len(text) - 1
        assert batch["tokens"][row, :size].tolist() == text[:-1]
        assert batch["targets"][row, :size].tolist() == text[1:]
        assert batch["segment_ids"][row].tolist() == [1] * size + [0] * (LENGTH - size)
        has_loss = [token != HOLDER for token in text[1:]]
        assert batch["loss_mask"][row, :size].tolist() == has_loss
        assert data.image(row) == (tmp_path / f"{row}.png").read_bytes()
    assert batch["images"].shape == (3, 4, 6, 3) and batch["images"].dtype == np.uint8
    assert (batch["images"][1] == picture(6, 4)[0]).all()  # of that size already
    again = pickle.loads(pickle.dumps(data)).batch(np.arange(3))
    assert all((again[name] == batch[name]).all() for name in batch)


def test_rows_that_are_refused(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(picture(3, 3)[1])
    (tmp_path / "text.png").write_bytes(b"text")
    rows = [
        ({"image": "a.png"}, 'with "image" and "text"'),
        ({"image": "a.png", "text": ""}, "its text is empty"),
        ({"image": "none.png", "text": "x"}, "image none.png: No such file"),
        ({"image": "text.png", "text": "x"}, "image text.png: an image of 4 bytes cannot be"),
    ]
    assert prepare(tmp_path, [row for row, _ in rows]) == 2
    lines = capsys.readouterr().err.splitlines()
    for number, (line, (_, error)) in enumerate(zip(lines, rows, strict=False), 1):
        assert f"line {number}: " in line and error in line
    assert not list(tmp_path.glob("out*"))


def test_the_settings_of_a_run_open_images_but_cannot_train_on_them(tmp_path, capsys):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(picture(5, 4)[1])
    spec, rows = "bytes?special_tokens=<image>", [{"image": f"{i}.png", "text": "a"} for i in "012"]
    assert prepare(tmp_path, rows, "--append_eod", f"--tokenizer={spec}") == 0
    config = DataConfig(objective=Objective.image_text, sequence_length=LENGTH, split="2,1,0")
    config.tokenizer, config.tokens_per_image, config.image_size = spec, 2, (4, 6)
    place = config, [str(tmp_path / "out")], load_tokenizer(spec)
    train, validation, test = (build_dataset(*place, n, 1) for n in (0, 1, 2))
    assert (train.samples_per_epoch, validation.samples_per_epoch, test) == (2, 1, None)
    batch = train.batch(np.arange(2))
    assert batch["images"].shape == (2, 4, 6, 3)
    assert batch["tokens"][:, :3].tolist() == [[257, 257, ord("a")]] * 2
    saved = json.loads(json.dumps(record_order(train, 2)))
    assert compare(saved, train, 2) == Difference(0, 0)
    config.image_size = (4, 4)
    assert compare(saved, build_dataset(*place, 0, 1), 2).is_bound
    config.image_token = "<picture>"
    with pytest.raises(
        ValueError, match=r"data\.image_token='<picture>' is no token of data\.token"
    ):
        build_dataset(*place, 0, 1)
    run = ["--config=gpt", "--data.objective=image_text", f"--data.paths={tmp_path}/out"]
    run += [f"--data.tokenizer={spec}", "--data.tokens_per_image=2", f"--run_dir={tmp_path}/run"]
    capsys.readouterr()
    assert preprocess.main(["inspect", *run, "--data.split=2,1,0"]) == 0
    assert "train " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["train", *run])
    assert "data.objective=image_text cannot be trained yet" in capsys.readouterr().err


def test_every_objective_opens_data():
    assert OPENERS.keys() == set(Objective)
