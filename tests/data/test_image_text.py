"""Pairs of images and texts: files, samples, and what is refused."""

import io
import json
import pickle

import numpy as np
import pytest
from PIL import Image

from maxmeg import preprocess
from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter
from maxmeg.data.samples.image_text import (
    ImageTextDataset,
    ImageTokens,
    decode_image,
    image_bytes,
    image_words,
)

EOD, HOLDER, LENGTH = 256, 33, 12  # HOLDER: "!"
TOKENS = ImageTokens(HOLDER, 3, EOD, EOD, 257)


def picture(width: int, height: int, kind: str = "PNG") -> tuple[np.ndarray, bytes]:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return pixels, file.getvalue()


def prepared(tmp_path, texts, *flags) -> int:
    rows = []
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.png").write_bytes(picture(5 + i, 4)[1])
        rows.append({"image": f"{i}.png", ("text", "caption")[i % 2]: text})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [f"--input={tmp_path}/rows.jsonl", f"--output={tmp_path}/out"]
    return preprocess.main(
        ["image-text", *files, f"--images={tmp_path}", "--tokenizer=bytes", *flags]
    )


def opened(tmp_path, index: int = 1, **changes) -> ImageTextDataset:
    split = ",".join(str(int(i == index)) for i in range(3))
    length, size = changes.get("length", LENGTH), (4, 6)
    tokens = changes.get("tokens", TOKENS)
    return ImageTextDataset(IndexedDataset(tmp_path / "out"), split, index, length, size, tokens)


def test_an_images_file_is_kept_to_the_byte():
    for size in range(1, 9):
        data = bytes(range(size))
        words = image_words(data)
        assert words.dtype == np.int32 and image_bytes(words) == data
    for words in ([], [0], [4, 1], [-1, 1]):
        with pytest.raises(ValueError, match="not the beginning of an image's sequence"):
            image_bytes(np.array(words, np.int32))


def test_rows_become_samples(tmp_path):
    texts = ["red", "a ! b", "x" * 30]
    assert prepared(tmp_path, texts, "--append_eod", "--placeholder=") == 0
    stored = IndexedDataset(tmp_path / "out")
    assert stored.modes is not None and stored.modes.tolist() == [0, 1] * 3
    assert stored.document_indices.tolist() == [0, 2, 4, 6]
    data = opened(tmp_path)
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
    train = opened(tmp_path, 0)
    orders = {tuple(train.batch(np.arange(e * 3, e * 3 + 3))["tokens"][:, 4]) for e in range(9)}
    assert len(orders) > 1 and len({tuple(sorted(order)) for order in orders}) == 1


def test_texts_filled_up_with_ends_have_one(tmp_path):
    assert prepared(tmp_path, ["ab", "cdefgh"], "--append_eod", "--length=5") == 0
    stored = IndexedDataset(tmp_path / "out")
    assert [stored.get(i).tolist() for i in (0, 2)] == [[*b"ab", EOD, EOD, EOD], [*b"cdefg"]]
    batch = opened(tmp_path).batch(np.arange(2))
    assert batch["segment_ids"].sum(1).tolist() == [3 + 3 - 1, 3 + 5 - 1]


def test_images_in_colours_and_sizes():
    pixels, data = picture(9, 7)
    assert (decode_image(data) == pixels).all()
    assert decode_image(data, (3, 5)).shape == (3, 5, 3)
    grey = io.BytesIO()
    Image.fromarray(pixels[..., 0]).save(grey, "GIF")
    assert decode_image(grey.getvalue()).shape == (7, 9, 3)
    bomb = data.replace((9).to_bytes(4) + (7).to_bytes(4), (2**15).to_bytes(4) * 2)
    for bad in (b"", b"no image", data[: len(data) // 2], bomb):
        with pytest.raises(ValueError, match="bytes cannot be decoded: "):
            decode_image(bad)


def test_rows_that_are_refused(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(picture(3, 3)[1])
    (tmp_path / "text.png").write_bytes(b"text")
    rows = [
        ({"image": "a.png"}, 'with "image" and "text"'),
        ({"text": "x"}, 'with "image"'),
        ({"image": "a.png", "text": ""}, "its text is empty"),
        ({"image": "none.png", "text": "x"}, "image none.png: No such file"),
        ({"image": "text.png", "text": "x"}, "image text.png: an image of 4 bytes cannot be"),
        ({"image": "a.png", "text": "\ud800"}, "half a surrogate pair"),
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row, _ in rows))
    flags = ["--tokenizer=bytes", f"--images={tmp_path}", f"--output={tmp_path}/out"]
    assert preprocess.main(["image-text", f"--input={tmp_path}/rows.jsonl", *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    for number, (line, (_, error)) in enumerate(zip(lines, rows, strict=False), 1):
        assert f"line {number}: " in line and error in line
    assert not list(tmp_path.glob("out*"))
    (tmp_path / "rows.jsonl").write_text("\n")
    assert preprocess.main(["image-text", f"--input={tmp_path}/rows.jsonl", *flags]) == 2
    assert "no rows" in capsys.readouterr().err


def test_corpora_that_are_refused(tmp_path):
    assert prepared(tmp_path, ["a!!", "b"]) == 0
    with pytest.raises(ValueError, match="document 0: its text has 2 placeholders"):
        opened(tmp_path).batch(np.arange(1))
    with pytest.raises(ValueError, match="leave no room for text"):
        opened(tmp_path, length=3)
    with pytest.raises(ValueError, match="placeholder 300 is not in the vocabulary"):
        opened(tmp_path, tokens=ImageTokens(300, 3, EOD, EOD, 257))
    with pytest.raises(ValueError, match="made with another tokenizer"):
        opened(tmp_path, tokens=ImageTokens(1, 3, 2, 2, 50)).batch(np.arange(2))
    with pytest.raises(ValueError, match="leaves none of 2 pairs"):
        ImageTextDataset(IndexedDataset(tmp_path / "out"), "1,0,0", 1, LENGTH, (4, 4), TOKENS)
    for name, modes, error in (
        ("plain", None, "has no modes"),
        ("turned", [1, 0], r"\[1, 0\], not \[0, 1\]"),
        ("text", [0, 0], r"\[0, 0\], not \[0, 1\]"),
    ):
        with IndexedWriter(tmp_path / name, dtype="i4", multimodal=modes is not None) as writer:
            writer.add_document([1, 2, 3], [1, 2], modes)
        with pytest.raises(ValueError, match=error):
            ImageTextDataset(IndexedDataset(tmp_path / name), "1", 0, LENGTH, (4, 4), TOKENS)
