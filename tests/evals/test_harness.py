"""A model as lm-evaluation-harness asks for one, without that library."""

import functools
import importlib
import json
import types

import jax
import numpy as np
import pytest
from layouts import mesh_of, tiny, tiny_state

from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.evals.harness import (
    HarnessModel,
    bucket,
    harness_model,
    packed,
    run_tasks,
    until,
)
from maxmeg.inference.load import Trained
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling

TOLERANCE = 1e-4  # float32: paddings differ
LONGEST = 28  # the model's context: rows are padded to 16 and 32 tokens
RANDOM = np.random.default_rng(0)


def some(length: int) -> list[int]:
    return RANDOM.integers(0, 60, length).tolist()


SHARED = some(20)
PAIRS = [
    *(
        (some(a), some(b))
        for a, b in [(1, 1), (3, 9), (16, 1), (18, 11), (27, 1), (70, 5), (2, 28)]
    ),
    *((SHARED, [*SHARED[:3], i]) for i in range(5)),
]
WORDS = ["<s>", "</s>", "a", "b", " ", " a", " b", "|"]


@functools.cache
def trained(**parallel: int) -> Trained:
    model = {
        "attention.num_kv_heads": 4,
        "init_std": 0.3,
        "max_position": LONGEST,
        "layers": "*(local,mlp)",
        "attention.window": 7,
    }
    config = tiny(model, **parallel or {"fsdp": 1})
    mesh = mesh_of(config)
    _, _, state = tiny_state(config, mesh)
    return Trained(state.model, config, load_tokenizer("null:61"), 0, mesh)


@functools.cache
def harness(batch: int = 4, **parallel: int) -> HarnessModel:
    return HarnessModel(trained(**parallel), batch)


def text(ids) -> str:
    return " ".join(map(str, ids))


def asked(*args):
    return types.SimpleNamespace(args=args)


@functools.cache
def forward():
    return jax.jit(lambda model, ids: jax.nn.log_softmax(model(ids)[0]))


def log_probabilities(ids) -> np.ndarray:
    """Of every next token, by one forward pass over one row of a fixed length."""
    row = np.pad(ids, (0, LONGEST - len(ids)))[None]
    return np.asarray(forward()(trained().model, row))[: len(ids)]


def plain_score(context, following) -> tuple[float, bool]:
    ids = [*context, *following][-LONGEST - 1 :]
    values_LV = log_probabilities(ids[:-1])[-len(following) :]
    likeliest = bool((values_LV.argmax(1) == following).all())
    return float(values_LV[np.arange(len(following)), following].sum()), likeliest


def greedy(context, count: int) -> list[int]:
    ids = list(context)
    for _ in range(count):
        ids.append(int(log_probabilities(ids)[-1].argmax()))
    return ids[len(context) :]


@pytest.mark.parametrize(("batch", "parallel"), [(2, {"fsdp": 1, "tensor": 8}), (4, {})])
def test_scores_are_those_of_plain_forward_passes(batch, parallel):
    pairs = [*PAIRS, (SHARED, greedy(SHARED, 4)), (SHARED, [*greedy(SHARED, 3), 0])]
    actual = harness(batch, **parallel).scores(pairs)
    assert actual[-2][1] and not actual[-1][1]
    for pair, (value, likeliest) in zip(pairs, actual, strict=True):
        wanted = plain_score(*pair)
        assert value == pytest.approx(wanted[0], rel=TOLERANCE) and likeliest == wanted[1]


def test_few_programs_are_compiled():
    run = harness().run
    before = run._cache_size()
    harness().scores([(some(length), some(2)) for length in range(1, LONGEST)])
    assert 0 <= run._cache_size() - before <= 2 <= run._cache_size()  # 16 and 32 tokens
    lengths = {1: 16, 16: 16, 17: 32, 32: 32, 33: 64, 64: 64, 65: 128}
    assert {length: bucket(length) for length in lengths} == lengths


def test_answers_that_differ_in_their_last_token_share_rows():
    pairs = [*PAIRS, *[(SHARED[:2], [i % 60]) for i in range(200)]]
    batches = list(packed(pairs, 3))
    assert sorted(i for _, shares in batches for i, _ in shares) == list(range(len(pairs)))
    rows = sum(int(np.count_nonzero(tokens.lengths_B)) for tokens, _ in batches)
    assert rows <= 9 + 200 // 16 + 1  # as far as there is room
    assert list(packed([], 3)) == []


def test_texts_are_scored_as_their_tokens():
    context, following = some(5), some(3)
    requests = [asked(text(context), " " + text(following)), asked("", text(following))]
    requests.append(asked(text(context) + "  ", text(following)))
    requests.append(asked("", "60 " + text(following)))
    actual = harness().loglikelihood(requests)
    actual += harness().scores([(context, following), ([60], following)])
    for one, other in ((0, 2), (0, 4), (1, 3), (1, 5)):
        assert actual[one] == (pytest.approx(actual[other][0], rel=TOLERANCE), actual[other][1])


def test_long_texts_are_scored_in_windows():
    ids = some(2 * LONGEST + 7)
    values = harness().loglikelihood_rolling([asked(text(ids)), asked(""), asked(text(ids[:9]))])
    whole = [60, *ids]
    wanted = plain_score(whole[:1], whole[1 : LONGEST + 1])[0]
    wanted += plain_score(whole[: LONGEST + 1], whole[LONGEST + 1 : 2 * LONGEST + 1])[0]
    wanted += plain_score(whole[: 2 * LONGEST + 1], whole[2 * LONGEST + 1 :])[0]
    assert values[0] == pytest.approx(wanted, rel=TOLERANCE) and values[1] == 0
    assert values[2] == pytest.approx(plain_score([60], ids[:9])[0], rel=TOLERANCE)


def test_generation_ends_at_stop_strings():
    count = 12  # all prompts are padded to 16 tokens
    random = np.random.default_rng(2)
    contexts = [random.integers(0, 60, length).tolist() for length in (4, 9, 60)]
    new = [greedy(ids[-(LONGEST - count) :], count) for ids in contexts]
    assert 60 not in [i for ids in new for i in ids]
    stop = str(new[0][3])
    stops = [{"max_gen_toks": count}, {"max_gen_toks": count, "until": [f" {stop} ", ""]}]
    requests = [asked(text(ids), stops[0]) for ids in contexts]
    requests += [asked(text(contexts[0]), stops[1]), asked("", {"until": stop, "max_tokens": 2})]
    actual = harness().generate_until(requests)
    assert actual[:3] == [text(ids) for ids in new]
    assert actual[3] == until(text(new[0]), [f" {stop} "]) != actual[0]
    assert actual[4] == until(text(greedy([60], 2)), [stop])


def test_settings_of_a_task():
    request = harness().settings({"until": ["7", "1 2"], "max_new_tokens": 3})
    assert request == Request(3, Sampling(temperature=0), (60,), ("7", "1 2"))
    assert harness().settings({"temperature": 0.5, "top_k": 3}).sampling == Sampling(0.5, 3)
    assert harness().settings({"temperature": 1, "do_sample": False}).sampling.temperature == 0


def folder_of_words(folder, opens: bool):
    import tokenizers

    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, "|")
    )
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(" ?[ab]|\\S| "), "isolated")
    made.pre_tokenizer = split
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(WORDS[:2])
    if opens:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(f"huggingface:{folder / 'tokenizer.json'}")
    one = trained()
    return HarnessModel(Trained(one.model, one.config, tokenizer, 0, one.mesh))


@pytest.mark.parametrize(
    ("opens", "context", "following", "wanted"),
    [
        (False, "a b", " a", ([2, 6], [5])),
        (False, "a ", "b", ([2], [6])),  # the space belongs to what follows it
        (False, "", " a", ([0], [5])),
        (False, " ", "a", ([0], [5])),
        (False, "", "<s>a", ([0], [2])),
        (True, "a b", " a", ([0, 2, 6], [5])),
        (True, "<s>a", " b", ([0, 2], [6])),  # no second opening
        (True, "", "a", ([0], [2])),
    ],
)
def test_context_and_continuation_are_split(tmp_path, opens, context, following, wanted):
    assert folder_of_words(tmp_path, opens).encode_pair(context, following) == wanted


def test_special_tokens_are_no_text_and_chats_go_through_the_template(tmp_path):
    model = folder_of_words(tmp_path, True)
    assert model.hidden_ids == {0, 1}
    assert model.apply_chat_template([{"role": "user", "content": "a b"}]) == "a b"
    assert model.chat_template(True) == "{{ messages[0].content }}" and not model.chat_template()
    assert model.tokenizer_name == model.trained.tokenizer.identity
    with pytest.raises(NotImplementedError, match="a message that the task begins"):
        model.apply_chat_template([], add_generation_prompt=False)


def scored(context: str, following: str):
    return harness().loglikelihood([asked(context, following)])


def written(**settings):
    return harness().generate_until([asked("1", settings)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scored("1 2", " "), "after '1 2' adds no token"),
        (lambda: scored("", ""), "adds no token"),
        (lambda: scored("1", " 2" * 29), "of 29 tokens is longer than the context of 28"),
        (lambda: written(max_gen_toks=28), "28 new tokens leave no room"),
        (lambda: written(do_sample=True), r"do_sample=True with temperature 0"),
        (lambda: written(num_beams=4), r"\{'num_beams': 4\} are not known: supported are until"),
        (lambda: HarnessModel(trained(), 0), "batch=0 must be at least 1"),
    ],
)
def test_invalid_requests_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_tasks_are_names_or_files(monkeypatch, tmp_path):
    asked = {}

    def simple_evaluate(model, task_manager, **settings):
        asked.update(settings, defaults=task_manager.include_defaults, batch=model.batch)
        return "results"

    def manager(include_defaults):
        names = ["arc_easy", "arc_challenge"] if include_defaults else []
        return types.SimpleNamespace(all_tasks=names, include_defaults=include_defaults)

    fake = types.SimpleNamespace(
        LM=type("LM", (), {}),
        TaskManager=manager,
        simple_evaluate=simple_evaluate,
        make_table=lambda results: f"table of {results}",
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    file = tmp_path / "own.yaml"
    file.touch()
    assert run_tasks(trained(), [str(file)], 3, limit=5) == "table of results"
    settings = {"tasks": [str(file)], "num_fewshot": None, "limit": 5}
    assert asked == {**settings, "defaults": False, "batch": 3}
    run_tasks(trained(), ["arc_easy", str(file)], shots=2)
    assert asked["defaults"] and asked["num_fewshot"] == 2
    with pytest.raises(
        ValueError, match=r"'arc_esy' is neither .* nor a file: nearest are arc_easy"
    ):
        run_tasks(trained(), ["arc_esy"])


def test_without_the_library_the_error_names_it(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ValueError, match=r"pip install 'maxmeg\[evals\]'"):
        harness_model(trained())
