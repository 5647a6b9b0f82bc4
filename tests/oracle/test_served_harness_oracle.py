"""lm-evaluation-harness scores a server (local-completions) as it scores the model in-process."""

import json

import numpy as np
import pytest
from harness_tasks import BATCH, assert_same, tasks
from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from tiny_servers import LENGTH, make_run, serving

from maxmeg import evaluate
from maxmeg.evals.harness import harness_model
from maxmeg.inference.load import load_run


@pytest.mark.filterwarnings("ignore")  # of the harness and its libraries
def test_scores_of_a_server_are_those_of_its_model(tmp_path, capsys):
    run, data = make_run(tmp_path), tmp_path / "data"
    data.mkdir()
    alone = TaskManager(include_defaults=False)
    with serving(run) as server:
        client = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model="tiny",
            tokenizer_backend="auto",  # asks the server for its tokenizer
            max_length=LENGTH,
            batch_size=BATCH,
        )
        assert client.tokenizer_backend == "remote"
        models = client, harness_model(load_run(str(run)), BATCH)
        served, ours = (
            simple_evaluate(one, tasks=tasks(data), bootstrap_iters=0, task_manager=alone)
            for one in models
        )
    assert served and ours
    assert_same(served, ours)
    own = data / "answers.yaml"
    own.write_text(json.dumps(tasks(data)[0]))  # JSON is YAML
    evaluate.main(evaluate.Options(run_dir=str(run), tasks=(str(own),), limit=8))
    score = np.mean([sample["acc"] for sample in ours["samples"]["answers"][:8]])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "|acc     |" in line]
    assert float(row.split("|")[7]) == pytest.approx(score, abs=1e-4)
