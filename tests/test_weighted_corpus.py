"""From rows with weights to a run: documents of weight 0 train nothing, on any layout."""

import json

import numpy as np
import pytest
from short_runs import SAME, config, curve

from maxmeg import preprocess
from maxmeg.config.data import Packing
from maxmeg.train import main

STEPS = 2
LAYOUTS = ({"data": 2, "context": 2, "pipe": 2}, {})  # the first one has two microbatches


def test_documents_of_weight_0_have_no_gradient_on_any_layout(tmp_path):
    """Runs whose documents of weight 0 have other texts, on other meshes, have the same losses."""
    rng, found = np.random.default_rng(0), []
    sizes, weights = rng.integers(2, 30, 200), rng.choice([0, 0.5, 1, 3], 200)
    others = rng.integers(100, 109, 200)
    for number, parallel in enumerate(LAYOUTS):
        letters = np.where(weights == 0, 97 + number, others)
        texts = [chr(letter) * size for letter, size in zip(letters, sizes, strict=True)]
        rows = zip(texts, weights, strict=True)
        source, prefix = tmp_path / f"{number}.jsonl", f"{tmp_path}/{number}"
        source.write_text("\n".join(json.dumps({"text": t, "weight": w}) for t, w in rows))
        flags = f"--input={source}", f"--output={prefix}", "--workers=0", "--append_eod"
        assert preprocess.main(flags) == 0
        model = {"num_layers": 2, "dropout_hidden": 0.0}
        run = config(f"{prefix}_text_document", tmp_path / f"run{number}", STEPS, model, parallel)
        run.data.packing = Packing.best_fit
        run.train.micro_batch_size = 4 if parallel else 0
        main(run)
        steps, names = curve(tmp_path / f"run{number}"), ("loss", "tokens", "validation_loss")
        found.append([step.get(name, 0) for step in steps for name in names])
    assert found[0] == pytest.approx(found[1], rel=SAME)
