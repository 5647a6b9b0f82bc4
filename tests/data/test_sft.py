"""Chats become rows: tokens, what has a loss, what is too long, and what cannot be read."""

import collections
import gzip
import json
import logging
import pickle
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizer_files import folder

from maxmeg.config.data import DataConfig, Objective, Packing, TooLong
from maxmeg.data.build import build_dataset, open_corpus
from maxmeg.data.chat.answers import prepare
from maxmeg.data.chat.preferences import PREFERENCES
from maxmeg.data.chat.sft import CHATS
from maxmeg.data.samples.packing import PackedDataset
from maxmeg.data.tokenizers.load import load_tokenizer

pytestmark = pytest.mark.usefixtures("renders_here")
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '.' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
WEIGHTS = [1, 2, 3, 0, 5, None, 2.0, 1, 4, 2]  # of rows
LENGTHS = [1, 3, 9, 2, 30, 5, 4, 4, 12, 1]  # characters that the assistant says
LENGTH = 16


def chat(answer: str, question: str = "q?") -> dict:
    roles = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": text} for role, text in roles]}


@pytest.fixture
def files(tmp_path):
    """(chats of LENGTHS, a template)."""
    rows = [chat(chr(97 + i) * n) for i, n in enumerate(LENGTHS)]
    (tmp_path / "chats.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    return str(tmp_path / "chats.jsonl"), str(tmp_path / "t.jinja")


def settings(files, **changes) -> DataConfig:
    data = DataConfig(objective=Objective.sft, paths=files[:1], chat_template=files[1])
    data.sequence_length, data.split = LENGTH, "1,0,0"
    for name, value in changes.items():
        setattr(data, name, value)
    return data


def built(data: DataConfig, tmp_path, split: int):
    tokenizer, prefixes = open_corpus(data, str(tmp_path))
    cache = str(tmp_path / "cache")
    return build_dataset(data, prefixes, tokenizer, split, seed=5, cache_dir=cache)


def opened(data: DataConfig, tmp_path, split: int = 0) -> PackedDataset:
    actual = built(data, tmp_path, split)
    assert isinstance(actual, PackedDataset)
    return actual


def conversations(data) -> dict[str, str]:
    """Text of each -> what of it has a loss, from one epoch."""
    batch, texts = data.batch(np.arange(data.samples_per_epoch)), {}
    for row in range(len(batch["tokens"])):
        ids = batch.get("segment_ids", np.ones_like(batch["tokens"]))[row]
        for segment in range(1, ids.max() + 1):
            has_loss = (ids == segment) & (batch["loss_mask"][row] > 0)
            here = np.flatnonzero(
                (ids == segment) & (np.arange(LENGTH) <= has_loss.nonzero()[0][-1])
            )
            tokens, targets = batch["tokens"][row], batch["targets"][row]
            assert (batch["positions"][row, here] == np.arange(len(here))).all()
            text = bytes([*tokens[here].tolist(), targets[here[-1]]]).decode()
            texts[text] = bytes(targets[has_loss].tolist()).decode()
    return texts


@pytest.mark.parametrize("packing", Packing)
def test_every_conversation_once_with_its_loss(files, tmp_path, packing):
    data = opened(settings(files, packing=packing), tmp_path)
    said = [chr(97 + i) * n + "." for i, n in enumerate(LENGTHS) if 4 + 2 + n + 1 <= LENGTH + 1]
    assert conversations(data) == {"u:q?a:" + text: text for text in said}
    assert str(data.source) == "8 whole, 0 truncated, 2 dropped"
    assert data.num_tokens == sum(len("u:q?a:" + text) - 1 for text in said)
    batch = data.batch(np.arange(3))
    has_segments = settings(files, packing=packing).has_segments
    assert ("segment_ids" in batch) == has_segments == (packing is not Packing.none)
    again = pickle.loads(pickle.dumps(data)).batch(np.arange(3))
    assert all((batch[name] == again[name]).all() for name in batch)


def weights_of_targets(data: PackedDataset) -> collections.Counter:
    """The sum of the loss mask over an epoch, by (tokens of the text before the target, target).

    A run's loss is a sum over these, each divided by the sum of all.
    """
    batch, sums = data.batch(np.arange(data.samples_per_epoch)), collections.Counter()
    for row, at in np.argwhere(batch["loss_mask"]).tolist():
        begin = at - batch["positions"][row, at]
        before = bytes(batch["tokens"][row, begin : at + 1].tolist())
        sums[before, chr(batch["targets"][row, at])] += float(batch["loss_mask"][row, at])
    return sums


@pytest.mark.parametrize("packing", Packing)
def test_a_row_of_weight_2_counts_as_two_rows(files, tmp_path, packing):
    rows, sums = [chat(chr(97 + i) * n) for i, n in enumerate(LENGTHS)], []
    weighted = [row | {"weight": w} for row, w in zip(rows, WEIGHTS, strict=True)]
    pairs = zip(rows, WEIGHTS, strict=True)
    repeated = [row for row, w in pairs for _ in range(int(1 if w is None else w))]
    for number, each in enumerate((weighted, repeated)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("\n".join(map(json.dumps, each)))
        sums.append(
            weights_of_targets(opened(settings((str(path), files[1]), packing=packing), tmp_path))
        )
    assert sums[0] == sums[1] and {*sums[0].values()} == {1, 2, 3}


def test_a_token_has_the_weight_of_its_row_times_that_of_its_message(files, tmp_path, capsys):
    turns = [chat(text)["messages"] for text in "xyz"]
    for (_, said), weight in zip(turns, (0.5, 0, 3), strict=True):
        said["weight"] = weight
    row = {"messages": [*turns[0], *turns[1], *turns[2]], "weight": 2.5}
    (tmp_path / "w.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps(chat("p") | {"weight": 0})
    )
    data = opened(settings((str(tmp_path / "w.jsonl"), files[1]), sequence_length=32), tmp_path)
    text = "u:q?a:x.u:q?a:y.u:q?a:z."
    ends = [(5, 1.25), (6, 1.25), (21, 7.5), (22, 7.5)]
    wanted = {(text[: i + 1].encode(), text[i + 1]): weight for i, weight in ends}
    assert (
        weights_of_targets(data) == wanted and data.batch(np.arange(1))["loss_mask"].dtype == "f4"
    )
    assert "(1 messages, 1 of weight 0), 24 tokens" in capsys.readouterr().err
    (tmp_path / "w.jsonl").write_text(json.dumps(row | {"weight": 0}))
    with pytest.raises(ValueError, match="all 1 rows have weight 0, which trains nothing"):
        opened(settings((str(tmp_path / "w.jsonl"), files[1])), tmp_path)


def test_long_conversations_lose_their_ends(files, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "maxmeg"):
        data = opened(settings(files, too_long=TooLong.truncate), tmp_path)
    assert str(data.source) == "8 whole, 2 truncated, 0 dropped"
    assert "e" * 11 in conversations(data).values()  # of 30: the row's 17 less those before
    assert "train documents: 8 whole, 2 truncated, 0 dropped; 10 rows of 16" in caplog.text
    with open(files[0], "a") as file:
        file.write("\n" + json.dumps(chat("z", question="q" * 40)))
    data = opened(settings(files, too_long=TooLong.truncate), tmp_path)
    assert str(data.source) == "8 whole, 2 truncated, 1 dropped"


def test_each_split_has_its_own_rows(files, tmp_path):
    parts = [opened(settings(files, split="6,4,0"), tmp_path, i) for i in range(2)]
    texts = [conversations(part) for part in parts]
    assert len(texts[0]) == 5 and len(texts[1]) == 3 and not texts[0].keys() & texts[1].keys()
    order = [text[6] for text in texts[1]]
    assert order == sorted(order)  # validation comes as it stands in the file
    assert built(settings(files, split="6,4,0"), tmp_path, 2) is None
    own = settings(files, paths=(), train_paths=files[:1], validation_paths=files[:1])
    assert [len(conversations(opened(own, tmp_path, i))) for i in range(2)] == [8, 8]
    assert built(own, tmp_path, 2) is None
    with pytest.raises(ValueError, match=r"is left \(0 whole, 0 truncated, 10 dropped\)"):
        opened(settings(files, sequence_length=4), tmp_path)


def test_prepared_files_are_built_once(files, tmp_path, capsys):
    opened(settings(files), tmp_path)
    assert "10 conversations of" in capsys.readouterr().err
    opened(settings(files, too_long=TooLong.truncate, packing=Packing.best_fit), tmp_path)
    assert not capsys.readouterr().err
    (made,) = (tmp_path / "cache").glob("chats-*")
    assert not (made / "weights.bin").stat().st_size  # none but 0 and 1, which loss.bin has
    (made / "loss.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"loss\.bin is empty.*or delete .*, and it is made again"):
        opened(settings(files), tmp_path)


REWRITES = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content if loop.last or "
    "m.role == 'user' else '-' }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def test_a_template_that_changes_earlier_turns_makes_several_texts(files, tmp_path, capsys):
    rows = [{"messages": chat(a)["messages"] + chat(a, "r")["messages"]} for a in "xyz"]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "t.jinja").write_text(REWRITES)
    data = settings(files, split="2,1,0")
    splits = [conversations(opened(data, tmp_path, i)) for i in range(2)]
    texts = [{f"u:q?;a:{a};": f"{a};", f"u:q?;a:-;u:r;a:{a};": f"{a};"} for a in "xyz"]
    assert splits == [texts[0] | texts[1], texts[2]]
    assert f"3 conversations of {files[0]} (messages) as 6 texts, " in capsys.readouterr().err
    pair = {"chosen": rows[0]["messages"], "rejected": rows[1]["messages"], "prompt": []}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    arguments = PREFERENCES, load_tokenizer("bytes"), tmp_path / "cache", files[1]
    with pytest.raises(ValueError, match="line 1: an answer has several turns of the assistant"):
        prepare(str(tmp_path / "pairs.jsonl"), *arguments)


def test_a_token_beyond_the_model_is_named(tmp_path, files):
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = folder(tmp_path / "hf", {"eos_token": "</s>", "chat_template": template})
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat("a b a", "b")))
    config = settings(files, chat_template="", tokenizer=tokenizer.spec)
    with pytest.raises(
        ValueError, match=r"chats\.jsonl, conversation 1: token 5 \('b'\) is not in"
    ):
        build_dataset(
            config, [*config.paths], tokenizer, 0, 5, 5, cache_dir=str(tmp_path / "cache")
        )


def test_bad_rows_are_named(files, tmp_path):
    bad = [b'{"messages"', b"\xff", b'{"messages": []}', *[b"1"] * 30]
    with open(files[0], "ab") as file:
        file.write(b"\n" + b"\n".join(bad))
    with pytest.raises(ValueError) as raised:
        opened(settings(files), tmp_path)
    lines = str(raised.value).splitlines()
    assert lines[0].startswith(f"{files[0]} line 20: invalid JSON")
    assert lines[1].startswith(f"{files[0]} line 21: invalid UTF-8")
    assert lines[-2:] == ["and 12 more", "fix these rows or remove them"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


FORMS = {
    "messages": {"messages": [{"role": "user", "content": "a\n\nb"}, chat("c")["messages"][1]]},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "a\n\nb"}, {"from": "gpt", "value": "c"}]
    },
    "Alpaca": {"instruction": "a", "input": "b", "output": "c"},
    "prompt and completion": {"prompt": "a\n\nb", "completion": "c"},
}


KINDS = ("a.json", "a.json.gz", "a.parquet", "a.arrow", "saved", "a-*.jsonl")


def write_rows(folder: Path, kind: str, rows: list[dict]) -> str:
    """Write rows into a file, or into several; returns its path, a folder or a glob."""
    path, names = folder / kind, dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    folder.mkdir()
    if kind == "a.parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    elif kind == "a.arrow":
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=2)
    elif kind == "saved":  # as `DatasetDict.save_to_disk` writes it
        files = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in range(2)]
        (path / "train").mkdir(parents=True)
        (path / "dataset_dict.json").write_text('{"splits": ["train"]}')
        (path / "train" / "state.json").write_text(json.dumps({"_data_files": files}))
        for i, file in enumerate(files):
            with pyarrow.ipc.new_stream(path / "train" / file["filename"], table.schema) as stream:
                stream.write_table(table[:1] if i == 0 else table[1:])
    elif "*" in kind:
        for i, row in enumerate(rows):
            (folder / f"a-{i}.jsonl").write_text(json.dumps(row))
    else:
        text = b"\xef\xbb\xbf " + json.dumps(rows, indent=1).encode()
        path.write_bytes(gzip.compress(text) if kind.endswith(".gz") else text)
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_form_in_every_kind_of_file(files, tmp_path, capsys, kind):
    path = write_rows(tmp_path / "good", kind, [*FORMS.values()])
    data = opened(settings(files, paths=(path,)), tmp_path)
    assert str(data.source).startswith("4 whole") and conversations(data) == {"u:a\n\nba:c.": "c."}
    assert f"4 conversations of {tmp_path / 'good'}" in (said := capsys.readouterr().err)
    assert "(1 messages, 1 ShareGPT, 1 Alpaca, 1 prompt and completion), 40 tokens" in said
    path = write_rows(tmp_path / "bad", kind, [FORMS["ShareGPT"], {"text": "a"}])
    with pytest.raises(
        ValueError, match=r"(row|line) \d: its fields \(text\) fit no form of a chat"
    ):
        opened(settings(files, paths=(path,)), tmp_path)


def test_an_empty_answer_has_its_end_and_half_a_character_is_refused(files, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(chat("")))
    assert conversations(opened(settings(files), tmp_path)) == {"u:q?a:.": "."}
    path.write_text(json.dumps(chat("\ud800")))
    with pytest.raises(ValueError, match=r"line 1: .*half a surrogate pair"):
        opened(settings(files), tmp_path)


def test_what_cannot_be_opened(files, tmp_path):
    tokenizer = load_tokenizer("bytes")
    chats, template, cache = *files, str(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    for path, place, jinja, message in (
        (chats, "", template, "give cache_dir"),
        (chats, cache, "", "has no chat template"),
        (chats, cache, "none.jinja", r"data\.chat_template=none\.jinja cannot be read"),
        (template, cache, template, r"is not named \.jsonl"),
        ("none.jsonl", cache, template, r"none\.jsonl does not exist"),
        (f"{cache}/empty.jsonl", cache, template, "holds no conversations"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(path, CHATS, tokenizer, place, jinja)
    with pytest.raises(NotImplementedError, match="'null:9' does not say where"):
        prepare(chats, CHATS, load_tokenizer("null:9"), cache, template)
    with pytest.raises(ValueError, match="has weights, but objective=sft"):
        opened(settings(files, paths=("0.5", files[0], "0.5", files[0])), tmp_path)


@pytest.mark.slow
def test_processes_make_the_same_files(files, tmp_path, monkeypatch):
    monkeypatch.setattr("maxmeg.data.chat.answers._ROWS_AT_ONCE", 4)
    tokenizer, made = load_tokenizer("bytes"), []
    for number in range(2):
        cache = tmp_path / str(number)
        folder = Path(prepare(files[0], CHATS, tokenizer, cache, files[1], 2 * number))
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert made[0] == made[1] and len(made[0]) == 9
    with open(files[0], "a") as file:
        file.write('\n{"messages": 1}\n')
    with pytest.raises(ValueError, match=r"line 20: .*not a list of messages"):
        prepare(files[0], CHATS, tokenizer, tmp_path, files[1], 2)


def test_a_process_that_is_killed_is_named(files, tmp_path, monkeypatch):
    monkeypatch.setattr("maxmeg.data.chat.answers._ROWS_AT_ONCE", 4)

    start, started = BaseProcess.start, []

    def start_and_kill(process):
        start(process)
        started.append(process)
        if len(started) == 2:  # the last: a pool of Python 3.11 may fail at a death while it starts
            process.kill()

    monkeypatch.setattr(BaseProcess, "start", start_and_kill)
    with pytest.raises(ChildProcessError, match="a process for conversations was killed, perhaps"):
        prepare(files[0], CHATS, load_tokenizer("bytes"), tmp_path / "cache", files[1], 2)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]
