"""What `maxmeg.preprocess` writes, against Megatron-LM's worker and writer, byte for byte."""

import json
import random
import warnings
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from maxmeg.data.corpus.indexed import DTYPES
from maxmeg.data.prepare.encoding import Options
from maxmeg.data.prepare.merge import merge
from maxmeg.data.prepare.run import Share, prepare
from maxmeg.data.tokenizers import vocabularies

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of accelerators that are not there
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

END = "<|endoftext|>"
WORDS = ["the", " a", "naïve", "東京", "\n\n", " ", "'s", " 1234", "\u00a0", "(x)", "🎉", END]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator(WORDS[:-1] * 3, trainer)
    model.model.save(str(path))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": END, "bos_token": END}
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": END}))
    return path


def text_of(source: random.Random) -> str:
    return "".join(source.choices(WORDS[:-1], k=source.randrange(30)))


def rows_of(seed: int) -> list[dict]:
    """Texts and lists of sentences under two keys, some of them empty."""
    source = random.Random(seed)
    return [
        {
            "text": text_of(source),
            "title": [text_of(source) for _ in range(source.randrange(4))]
            if source.random() < 0.5
            else text_of(source),
        }
        for _ in range(200)
    ]


def write_megatrons(rows: list[dict], key: str, folder: Path, prefix: Path, eod: bool) -> None:
    tokenizer = HuggingFaceTokenizer(str(folder))
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for row in rows:
        sentences = row[key] if isinstance(row[key], list) else [row[key]]
        encoded = [ids for sentence in sentences if (ids := tokenizer.text_to_ids(sentence))]
        lengths = [len(ids) for ids in encoded]
        document = [i for ids in encoded for i in ids]
        if document and eod:
            document.append(tokenizer.eod)
            lengths[-1] += 1
        builder.add_document(document, lengths)
    builder.finalize(f"{prefix}.idx")


def test_codes_of_dtypes_are_megatrons():
    assert {DType.code_from_dtype(dtype.type): dtype for dtype in DTYPES.values()} == DTYPES


@pytest.mark.parametrize("eod", [False, True])
@pytest.mark.parametrize("fast_after", [0, 1 << 30])
def test_files_are_megatrons(tmp_path, folder, monkeypatch, eod, fast_after):
    monkeypatch.setattr(vocabularies, "FAST_AFTER", fast_after)
    rows = rows_of(fast_after + eod)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = Options(f"gpt2:{folder}", ("text", "title"), append_eod=eod)
    shares = {"whole": [Share()], "parts": [Share(part_bytes=5000)]}
    shares["partitions"] = [Share(i, 3) for i in range(3)]
    for name, of_corpus in shares.items():
        for share in of_corpus:
            prepare([str(path)], str(tmp_path / name), options, 0, share=share)
    for key in options.json_keys:
        write_megatrons(rows, key, folder, tmp_path / "theirs", eod)
        merge(
            sorted(map(str, tmp_path.glob(f"partitions_*_{key}_document.idx"))),
            str(tmp_path / f"partitions_{key}_document"),
        )
        for name in shares:
            for suffix in (".bin", ".idx"):
                ours = tmp_path / f"{name}_{key}_document{suffix}"
                assert ours.read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
