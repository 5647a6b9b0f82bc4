"""Pairs of images and texts: what megatron-core's builder writes, and what its dataset reads."""

import json
import warnings

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what its imports say of optional packages
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from maxmeg.data.image_text_command import Pairs, write_pairs
from maxmeg.data.samples.image_text import image_bytes
from maxmeg.data.tokenizers.load import load_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # megatron-core's
LENGTH, EOD = 6, 256


def test_the_same_files(tmp_path):
    """Its script's steps: texts of one length, bytes filled up to words of 32 bits, their number
    in front."""
    theirs = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.int32, multimodal=True)
    random, rows, images = np.random.default_rng(1), [], []
    for i, text in enumerate(["red", "a long caption", "xyz123", "ü"]):
        images.append(random.bytes(8 + i))
        (tmp_path / f"{i}.png").write_bytes(images[-1])
        rows.append({"image": f"{i}.png", "text": text})
        ids = list(text.encode())[:LENGTH]
        theirs.add_item(torch.IntTensor(ids + [EOD] * (LENGTH - len(ids))))
        fill = -len(images[-1]) % 4
        words = np.frombuffer(images[-1] + b"\0" * fill, np.int32)
        theirs.add_item(torch.from_numpy(np.insert(words, 0, fill)), 1)
        theirs.end_document()
    theirs.finalize(str(tmp_path / "a.idx"))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = Pairs(load_tokenizer("bytes"), str(tmp_path), True, LENGTH, checks_images=False)
    assert write_pairs([str(tmp_path / "rows.jsonl")], str(tmp_path / "b"), pairs) == len(rows)
    for suffix in (".bin", ".idx"):
        ours, its = (tmp_path / f"{name}{suffix}" for name in "ba")
        assert ours.read_bytes() == its.read_bytes()
    read = IndexedDataset(str(tmp_path / "b"), multimodal=True)
    for i, image in enumerate(images):
        (text, text_mode), (words, image_mode) = read[2 * i], read[2 * i + 1]
        assert (text_mode, image_mode, len(text)) == (0, 1, LENGTH)
        assert image_bytes(words) == image
