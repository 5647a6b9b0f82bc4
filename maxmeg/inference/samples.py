"""What a trained model writes when a run ends, and other texts of one prompt."""

from jax.sharding import Mesh

from maxmeg.config.schema import Config
from maxmeg.data.chat.ends import end_tokens
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.inference.engine import Engine
from maxmeg.inference.load import Trained, load_run, without_pipeline
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling
from maxmeg.models.lm import LM

SAMPLE_TOKENS = 200  # that a run generates when training ends


def continue_text(
    trained: Trained, prompt: str, num_tokens: int, sampling: Sampling, seed: int
) -> str:
    """Return the continuation of a prompt up to the first end of a document.

    No BOS token is prepended: documents in training have none.
    """
    ids = trained.tokenizer.encode(prompt)
    config = trained.config
    ends = end_tokens(trained.tokenizer, config.data, config.model.vocab_size)
    engine = Engine(trained, max_num_seqs=1)
    return engine.generate([ids], Request(num_tokens, sampling, ends), seed)[0].text


def sample_at_end(
    prompt: str, model: LM, config: Config, tokenizer: Tokenizer, step: int, mesh: Mesh, saved: bool
) -> str:
    """Return a prompt with the continuation by the trained model.

    saved: whether there is a checkpoint of `step`. From it the model is read onto one device if the
    devices are virtual ones of this process's CPU, and with a pipeline onto a mesh without one;
    "" for a pipeline that is not saved.
    """
    average, pipelined = config.optim.ema.evaluates, mesh.shape["pipe"] > 1
    trained = Trained(model, config, tokenizer, step, mesh)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if saved and on_cpu and mesh.size > 1 and not mesh.is_multi_process:
        # XLA may start collectives that do not depend on each other, as small steps of decoding
        # have many, in another order on each virtual device of a busy CPU: they wait forever.
        trained = load_run(config.run_dir, step, average=average)
    elif saved and pipelined:
        mesh = without_pipeline(mesh, config.model.hidden_size)
        trained = load_run(config.run_dir, step, mesh, average=average)
    elif pipelined:
        return ""
    room = config.model.max_position - len(tokenizer.encode(prompt))
    sampling = Sampling(temperature=0.5, top_k=40)
    return prompt + continue_text(trained, prompt, min(SAMPLE_TOKENS, room), sampling, config.seed)
