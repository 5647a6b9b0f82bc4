"""Objectives in the model: a run learns from chats."""

import json

import jax
import jax.numpy as jnp
import pytest
from layouts import assert_equal_but_rounding, model_gradients, tiny
from short_runs import curve

import maxmeg
from maxmeg import generate
from maxmeg.objectives.objective import Objective, objective_of

TOLERANCE = 2e-6  # relative, float32: the order of sums differs
GRADIENT = 2e-5  # of a gradient's largest element: the loss is not fused with the logits
FLOOR = 1e-9  # for gradients that are zero in exact arithmetic
LENGTH = 48
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + ';' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def files(tmp_path) -> tuple[str, str]:
    """Sums as chats, and a template."""
    with open(tmp_path / "sums.jsonl", "w") as file:
        for a in range(6):
            for b in range(8):
                said = {"role": "assistant", "content": str(a + b)}
                row = {"messages": [{"role": "user", "content": f"{a}+{b}"}, said] * (1 + b % 2)}
                file.write(json.dumps(row) + "\n")
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    return str(tmp_path / "sums.jsonl"), str(tmp_path / "t.jinja")


@pytest.mark.slow
def test_a_loss_of_the_logits_has_the_gradients_of_the_built_in_one_on_a_sharded_vocabulary():
    def cross_entropy(logits_BLV, batch):
        chosen_BL1 = jnp.take_along_axis(logits_BLV, batch.targets[..., None], axis=-1)
        return jax.nn.logsumexp(logits_BLV, axis=-1) - chosen_BL1[..., 0]

    wanted = model_gradients(tiny({"num_layers": 1}, fsdp=1))
    sharded = tiny({"num_layers": 1}, fsdp=2, tensor=2)
    found = model_gradients(sharded, objective_of(cross_entropy))
    sides = (({"loss": loss}, gradients) for loss, gradients in (found, wanted))
    assert_equal_but_rounding(*sides, GRADIENT, FLOOR)
    assert found[0] == pytest.approx(wanted[0], rel=TOLERANCE)
    with pytest.raises(ValueError, match=r"returned shape \(8,\) for targets of shape \(8, 16\)"):
        model_gradients(sharded, objective_of(lambda logits_BLV, batch: logits_BLV[:, 0, 0]))


def tempered(model, h_BLD, batch, train, ctx):
    """A loss of log-probabilities at a temperature that is no sum of weighted ones."""
    log_probs_BL = model.token_log_probs(h_BLD, batch.targets, train, temperature=0.7)
    mask_BL = batch.loss_mask
    total = jnp.sum(jnp.exp(0.2 * log_probs_BL) * mask_BL / batch.divisors[0])
    return total, {"loss_sum": jnp.sum(log_probs_BL * mask_BL), "tokens": jnp.sum(mask_BL)}


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tensor": 2, "fsdp": 2}, {"context": 2}, {"pipe": 2}])
def test_a_loss_of_log_probs_has_the_gradients_of_log_softmax(axes):
    def of_logits(logits_BLV, batch):
        log_probs_BLV = jax.nn.log_softmax(logits_BLV / 0.7)
        targets_BL1 = batch.targets[..., None]
        return jnp.exp(0.2 * jnp.take_along_axis(log_probs_BLV, targets_BL1, axis=-1)[..., 0])

    fields = {"logit_softcap": 2.0, "num_layers": 2}
    _, wanted = model_gradients(tiny(fields), objective_of(of_logits))
    train = {"micro_batch_size": 4} if "pipe" in axes else None
    _, actual = model_gradients(tiny(fields, train, **axes), Objective(loss=tempered))
    assert_equal_but_rounding(({}, actual), ({}, wanted), GRADIENT, FLOOR)


@pytest.mark.slow
def test_chats_train_and_finetune(files, tmp_path, caplog):
    shared = {
        "data.objective": "sft",
        "data.paths": files[:1],
        "data.chat_template": files[1],
        "data.sequence_length": LENGTH,
        "data.split": "9,1,0",
        "train.num_steps": 30,
        "train.global_batch_size": 8,
        "train.eval_every": 15,
        "optim.warmup_steps": 3,
        "optim.lr": 1e-2,
        "log.every": 1,
        "log.sample_prompt": "",
    }
    small = {"model.num_layers": 2, "model.hidden_size": 32, "model.attention.num_heads": 4}
    runs = {
        "first": ("gpt", {**shared, **small, "data.packing": "first_fit"}),
        "second": (f"finetune:{tmp_path / 'first'}", shared),
    }
    losses = {}
    for name, (config, settings) in runs.items():
        maxmeg.train(maxmeg.config(config, run_dir=str(tmp_path / name), **settings))
        assert "train documents: 43 whole, 0 truncated, 0 dropped" in caplog.text
        losses[name] = [row["loss"] for row in curve(tmp_path / name)]
    assert losses["first"][-1] < losses["first"][0] / 2
    assert losses["second"][0] < losses["first"][0] / 2
    run_dir = str(tmp_path / "second")
    generate.main(generate.Options(run_dir=run_dir, chat=True, prompt=("1+1",), num_tokens=3))
