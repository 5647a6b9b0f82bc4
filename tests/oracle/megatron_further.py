"""A tiny GPT of megatron-core that predicts further tokens: its losses and their gradients.

python tests/oracle/megatron_further.py FOLDER   # one process on CPU; writes FOLDER/further.npz
"""

import pathlib
import sys
import warnings

from megatron_model import HEADS, HIDDEN, LENGTH, PADDED, build, without_cuda

DEPTHS, FACTOR, ROWS, FFN = 2, 0.3, 2, 48
ARGUMENTS = {
    "num_layers": 1,
    "ffn_hidden_size": FFN,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "mtp_num_layers": DEPTHS,
    "mtp_loss_scaling_factor": FACTOR,
}
assert HIDDEN % HEADS == 0


def main(folder: pathlib.Path) -> None:
    warnings.simplefilter("ignore")
    import numpy as np
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.multi_token_prediction import (
        MTPLossAutoScaler,
        MTPLossLoggingHelper,
    )

    without_cuda()
    zeros = torch.zeros
    torch.zeros = lambda *sizes, **options: zeros(*sizes, **options | {"device": "cpu"})
    # Its cross entropy writes into the logits; without a copy autograd refuses on one rank.
    layers.gather_from_tensor_model_parallel_region = lambda x, *_, **__: x.clone()
    parallel_state.initialize_model_parallel(1, 1)
    model = build(ARGUMENTS, 1, 1)
    rng = np.random.default_rng(0)
    actual = {name: rng.integers(0, PADDED, (ROWS, LENGTH)) for name in ("tokens", "targets")}
    actual["positions"] = np.tile(np.arange(LENGTH), (ROWS, 1))
    mask = (rng.random((ROWS, LENGTH)) < 0.7).astype(np.float32)
    tokens, targets, positions = map(torch.tensor, actual.values())
    weights, hidden = torch.tensor(mask), torch.ones(1, 1, LENGTH, LENGTH)
    causal = torch.triu(hidden, 1).bool()
    losses = model(tokens, positions, causal, labels=targets, loss_mask=weights)
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    told = MTPLossLoggingHelper.tracker["values"]
    actual |= {"loss_mask": mask, "losses": torch.cat([loss[None], told]).detach().numpy()}
    for name, parameter in model.named_parameters():
        actual |= {f"weights {name}": parameter.detach().numpy()}
        actual |= {f"gradients {name}": parameter.grad.numpy()}
    np.savez(folder / "further.npz", **actual)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
