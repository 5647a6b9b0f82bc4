"""megatron-core's T5 and ours, trained from the same weights on Megatron-LM's samples."""

import json
import sys
from pathlib import Path

import megatron_model
import megatron_t5
import numpy as np
from masked_corpus import corpus, vocabulary
from test_bert_curve_oracle import run, train

from maxmeg.config.model import Position
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.masked.t5 import T5Dataset
from maxmeg.hf.families.binding import Place
from maxmeg.hf.trained import TrainedModel
from maxmeg.megatron.convert import import_megatron

STEPS, ROWS = 100, 8
CLOSE = 1e-3  # relative
LENGTHS = megatron_t5.SOURCE, megatron_model.LENGTH


def samples(folder: Path) -> T5Dataset:
    data = IndexedDataset(str(folder / "sentences"))
    return T5Dataset(data, "1,0,0", 0, LENGTHS, vocabulary())


def test_a_hundred_steps_have_its_losses(tmp_path: Path):
    corpus(tmp_path)
    np.savez(tmp_path / "batches.npz", **samples(tmp_path).batch(np.arange(STEPS * ROWS)))
    run(megatron_t5.__file__, tmp_path, STEPS, ROWS)
    import_megatron(tmp_path / "t5", tmp_path / "imported")
    run(__file__, tmp_path)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    actual, wanted = [json.loads(row)["loss"] for row in rows], np.load(tmp_path / "losses.npy")
    print("largest relative difference", np.abs(actual / wanted - 1).max())
    assert wanted[-5:].mean() < 0.5 * wanted[0]
    np.testing.assert_allclose(actual, wanted, rtol=CLOSE)

    import_megatron(tmp_path / "relative", tmp_path / "imported relative")
    trained = TrainedModel(tmp_path / "imported relative", None)
    assert trained.model.position is Position.relative
    for side, table in np.load(tmp_path / "tables.npz").items():
        np.testing.assert_array_equal(trained.read(Place(f"relative.{side}.table")), table)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sizes = {"train.global_batch_size": ROWS, "train.num_steps": STEPS}
    sizes["data.source_length"] = megatron_t5.SOURCE
    train(folder, samples(folder), megatron_t5, **sizes)
