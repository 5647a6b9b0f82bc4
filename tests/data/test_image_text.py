"""Pairs of images and texts: files become samples; rows that `image-text` refuses."""

import io
import json
import pickle

import numpy as np
from PIL import Image

from maxmeg import preprocess
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.samples.image_text import ImageTextDataset, ImageTokens

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
