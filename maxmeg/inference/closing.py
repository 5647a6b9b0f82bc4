"""What a run writes when training ends."""

from jax.sharding import Mesh

from maxmeg.config.schema import Config
from maxmeg.data.tokenizers import Tokenizer
from maxmeg.inference.decode import continue_text
from maxmeg.inference.load import Trained, load_run, without_pipeline
from maxmeg.inference.sampling import Sampling
from maxmeg.models.lm import LM

SAMPLE_TOKENS = 200


def sample(model: LM, config: Config, tokenizer: Tokenizer, step: int, mesh: Mesh) -> str:
    """How the trained model continues log.sample_prompt; of a pipeline, the one saved at `step`."""
    prompt = config.log.sample_prompt
    trained = Trained(model, config, tokenizer, step, mesh)
    if mesh.shape["pipe"] > 1:
        trained = load_run(config.run_dir, step, without_pipeline(mesh, config.model.hidden_size))
    room = config.model.max_position - len(tokenizer.encode(prompt))
    sampling = Sampling(temperature=0.8, top_p=0.95)
    return continue_text(trained, prompt, min(SAMPLE_TOKENS, room), sampling, config.seed)
