"""The command that continues prompts and chats: what it reads, what it writes, what it refuses."""

import contextlib
import functools
import json
import sys

import jax.numpy as jnp
import pytest
from chats import PLAIN
from layouts import mesh_of, tiny, tiny_state
from tokenizer_files import WORDS, folder

from maxmeg import generate
from maxmeg.config.flags import parse
from maxmeg.config.model import DType
from maxmeg.inference import load
from maxmeg.inference.load import Trained

LENGTH = 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that writes "a" after anything, as every weight of its embedding says."""
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ bos_token }}" + PLAIN}
    path = tmp_path_factory.mktemp("model")
    tokenizer = folder(path, settings, generation_config={"eos_token_id": [1, 5]})
    fields = {"vocab_size": len(WORDS), "tied": False, "max_position": 32, "num_layers": 1}
    config = tiny(fields, fsdp=1)
    mesh = mesh_of(config)
    model = tiny_state(config, mesh)[2].model
    model.final_norm.weight[...] = jnp.zeros_like(model.final_norm.weight[...])
    return Trained(model, config, tokenizer, 0, mesh)


class PromptsAreKnown(Exception):
    """Ends a command before the model, which is compiled for each, continues its prompts."""


@pytest.fixture
def command(trained, monkeypatch):
    """Runs the command on the model, or only until the prompts are known; returns the prompts as
    the model sees them."""
    seen, stops = [], []

    def recorded(*arguments):
        found = encode(*arguments)
        seen.extend(trained.tokenizer.decode(ids) for ids in found)
        if stops:
            raise PromptsAreKnown
        return found

    def loaded(run_dir, step, mesh, dtype, mtp, average):
        trained.config.model.dtype = dtype or trained.config.model.dtype
        return trained

    encode = generate.encoded
    monkeypatch.setattr(load, "load_run", loaded)
    monkeypatch.setattr(generate, "encoded", recorded)

    def run(*flags: str, prompts_alone: bool = False) -> list[str]:
        seen.clear()
        stops[:] = [True] * prompts_alone
        fixed = ("--temperature=0", f"--num_tokens={LENGTH}")
        with contextlib.suppress(PromptsAreKnown):
            generate.main(parse(["generate", *fixed, *flags], generate.Options, False)[1])
        return list(seen)

    return run


def test_prompts_are_continued_in_their_order(command, capsys):
    assert command("--prompt=a", "--prompt", "b , a", "--batch=1") == ["a", "b [UNK] a"]
    first, second = capsys.readouterr().out.split("\n---\n")
    assert first.startswith("a") and second.startswith("b , a")
    assert first.count("<s>") == second.count("<s>") == LENGTH  # the first of all words


def test_chats_go_through_the_template(command, tmp_path):
    lines = [{"prompt": "b", "id": 7}, {"messages": [{"role": "user", "content": "a b"}]}]
    given, written = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    flags = (f"--prompts={given}", f"--output={written}")
    user = "<s> <|user|> {} </s> <|assistant|>"
    assert command(*flags) == ["b", user.format("a b")]
    first, second = map(json.loads, written.read_text().splitlines())
    assert first == {**lines[0], "completion": first["completion"]}
    assert second == {**lines[1], "completion": second["completion"]}
    assert first["completion"].split() == ["<s>"] * LENGTH
    chats = [user.format("b"), user.format("a b")]
    assert command(*flags, "--chat", prompts_alone=True) == chats
    system = "<s> [UNK] [UNK] [UNK] a </s> <|user|> b </s> <|assistant|>"
    assert command("--prompt=b", "--chat", "--system=a", prompts_alone=True) == [system]


def test_one_answer_is_streamed_to_a_terminal(command, capsys, monkeypatch):
    command("--prompt=b")
    whole = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(generate.Engine, "generate", None)
    command("--prompt=b")
    assert capsys.readouterr().out == whole


def test_rows_end_at_the_model_s_own_ends(command, trained, monkeypatch, capsys):
    monkeypatch.setattr(generate, "end_tokens", lambda *arguments: (1, 0))
    model = trained.config.model
    monkeypatch.setattr(model, "dtype", model.dtype)  # restored after the command has set it
    command("--prompt=a", "--dtype=bfloat16")
    assert model.dtype is DType.bfloat16
    assert capsys.readouterr().out == "a\n"


def test_prompts_open_as_the_tokenizer_does(command, trained, monkeypatch):
    monkeypatch.setattr(trained.tokenizer, "opening", (0,))
    of = functools.partial(command, "--prompt=a", prompts_alone=True)
    assert of() == ["<s> a"] and of("--noopening") == ["a"]
    assert of("--chat")[0].count("<s>") == 1


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", r"line 2: invalid JSON"),
        ("[1]", r"line 2: a row must be an object with either"),
        ("{}", r"line 2: a row must be an object with either"),
        ('{"prompt": "a", "messages": []}', r"line 2: a row must be an object with either"),
        ('{"prompt": 1}', r"line 2: prompt=1 is not text"),
        ('{"messages": []}', r"line 2: messages=\[\] is not a list of messages"),
        ('{"messages": [{"role": "user"}]}', r"line 2: messages\[0\] has no content, a text"),
        (r'{"prompt": "\ud800"}', "line 2: prompt has half a surrogate pair"),
        ('{"prompt": "a", "tools": [{"name": "f"}]}', "tools of the prompt 'a' are for chats: add"),
        (
            '{"messages": [{"role": "user", "content": "a"}], "tools": '
            '[{"type": "function", "function": {"name": "f"}}]}',
            "does not write tools: leave them out",
        ),
        ('{"prompt": ""}', r"prompt 2 of 2: the prompt is empty"),
    ],
)
def test_bad_lines_are_named(line, error, command, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ValueError, match=error):
        command(f"--prompts={path}")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--prompts=empty.jsonl"], "holds no prompt"),
        (["--prompt=a", "--prompts=empty.jsonl"], "give either --prompt"),
        (["--prompt=a", "--system=b"], "system='b' is for chats"),
        (["--prompt=a", "--num_tokens=0"], "num_tokens=0 must be at least 1"),
    ],
)
def test_options_that_do_not_go_together(flags, error, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=error):
        command(*flags)
