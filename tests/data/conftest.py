"""Tiny corpora and vocabularies, made on the spot."""

import base64
import json
import logging

import numpy as np
import pytest

from maxmeg.data.corpus.indexed import IndexedWriter

TEXT = "The quick brown fox jumps over the lazy dog. It's 1234 o'clock: naïve café, 東京 🎉!\n"


@pytest.fixture(scope="session")
def vocabularies(tmp_path_factory) -> dict[str, str]:
    """A spec of every kind of tokenizer."""
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("vocabularies")
    lines = [TEXT.strip(), "another line of words", "dogs and foxes", "words, words."] * 5
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "sp"),
        vocab_size=330,
        byte_fallback=True,
        character_coverage=1.0,
        pad_id=3,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator(lines, trainer)
    (folder / "hf").mkdir()
    model.save(str(folder / "hf" / "tokenizer.json"))
    (folder / "gpt2").mkdir()
    model.model.save(str(folder / "gpt2"))
    tokens = [bytes([b]) for b in range(256)] + [b"th", b"the", b" t", b"er"]
    ranks = b"".join(base64.b64encode(t) + f" {i}\n".encode() for i, t in enumerate(tokens))
    (folder / "ranks.tiktoken").write_bytes(ranks)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "fox", "##es", "hello"]
    words += [mark + c for c in "abcdefghijklmnopqrstuvwxyz0123456789" for mark in ("", "##")]
    words += [*"!'(),.-:[]<>|/", "東", "京", "word"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", "utf-8")
    return {
        "bytes": "bytes",
        "null": "null:1000",
        "sentencepiece": f"sentencepiece:{folder / 'sp.model'}",
        "huggingface": f"huggingface:{folder / 'hf' / 'tokenizer.json'}",
        "gpt2": f"gpt2:{folder / 'gpt2'}",
        "wordpiece": f"wordpiece:{folder / 'vocab.txt'}",
        "tiktoken": f"tiktoken:{folder / 'ranks.tiktoken'}",
    }


@pytest.fixture(scope="module")
def s3():
    """The address of an S3 server on loopback, which the environment names."""
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "x")
        yield host, port
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture
def make_corpus(tmp_path):
    """Writes documents of ids and returns the prefix."""

    def make(documents, name="corpus", vocab_size=1000) -> str:
        prefix = str(tmp_path / name)
        with IndexedWriter(prefix, vocab_size) as writer:
            for document in documents:
                writer.add_document(np.asarray(document))
        return prefix

    return make


@pytest.fixture
def write_lines(tmp_path):
    """Writes texts as JSON lines and returns the path."""

    def write(texts, name="corpus.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return str(path)

    return write
