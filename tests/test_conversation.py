"""The conversation in the terminal: what is sent to the model, what ends what."""

import json

import jax
import pytest
from chats import PLAIN
from tokenizer_files import WORDS, folder

import maxmeg
from maxmeg import chat
from maxmeg.config.flags import run_command
from maxmeg.inference.conversation import converse
from maxmeg.models.lm import LM


def talk(lines: list, answers: dict) -> list[list[str]]:
    """What the model is asked, as the contents of the messages, for these lines of a user."""
    asked = []

    def read() -> str:
        line = lines.pop(0) if lines else EOFError()
        if isinstance(line, BaseException | type):
            raise line
        return line

    def answer(messages, turn):
        asked.append([message["content"] for message in messages])
        for piece in answers.get(messages[-1]["content"], ["an", "swer"]):
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    converse(answer, read)
    return asked


def test_a_conversation_grows_until_it_is_reset(capsys):
    lines = [" a ", "", "b", KeyboardInterrupt(), "/what", "/reset", "c", "/exit", "never"]
    assert talk(lines, {}) == [["a"], ["a", "answer", "b"], ["c"]] and lines == ["never"]
    shown = capsys.readouterr().out
    assert shown.count("answer\n") == 3 and "/what is no command" in shown


def test_what_was_written_before_ctrl_c_stays_and_a_refused_message_does_not(capsys):
    stopped = {"a": ["so ", "far", KeyboardInterrupt()], "b": [ValueError("too long")]}
    assert talk(["a", "b", "c"], stopped)[1:] == [["a", "so far", "b"], ["a", "so far", "c"]]
    assert "error: too long\n" in capsys.readouterr().out
    assert talk(["a", "b"], {"a": [KeyboardInterrupt()]})[1] == ["b"]


@pytest.mark.slow
def test_the_command_answers_by_the_chat_template(tmp_path, monkeypatch, capsys):
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": PLAIN}
    folder(tmp_path / "words", settings)
    path = tmp_path / "words/tokenizer.json"
    changes = {"model.hidden_size": 32, "model.num_layers": 1, "model.attention.num_heads": 4}
    changes |= {"model.vocab_size": len(WORDS), "model.max_position": 16}
    config = maxmeg.config("gpt", **changes)
    config.data.tokenizer = f"huggingface:{path}"
    model = jax.jit(lambda key: LM(key, config.model))(jax.random.key(0))
    maxmeg.LanguageModel(model, config).save(tmp_path / "run")
    lines = ["a b", "a a a a a a a a a a a a"]
    monkeypatch.setattr("builtins.input", lambda prompt: lines.pop(0) if lines else "/exit")
    argv = ["chat", f"--run_dir={tmp_path / 'run'}", "--temperature=0", "--num_tokens=3"]
    run_command(chat.main, chat.Options, needs_config=False, argv=argv)
    head, answer, error = capsys.readouterr().out.splitlines()
    asked = [{"role": "user", "content": "a b"}]
    assert answer == maxmeg.load(tmp_path / "run").generate(asked, 3, temperature=0)
    assert "/reset" in head and "the context 16: /reset begins a new one" in error
    without = {name: text for name, text in settings.items() if name != "chat_template"}
    (tmp_path / "run/tokenizer/tokenizer_config.json").write_text(json.dumps(without))
    with pytest.raises(SystemExit):
        run_command(chat.main, chat.Options, needs_config=False, argv=argv)
    assert "has no chat template" in capsys.readouterr().err
