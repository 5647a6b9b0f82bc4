"""What a run computes: the mesh, the optimizer, the abstract state and the compiled steps."""

import jax
import numpy as np

from maxmeg.config.schema import Config
from maxmeg.config.validate import axis_sizes
from maxmeg.data.placement import local_rows
from maxmeg.eval_step import make_compute_copy, make_eval_step
from maxmeg.objectives.objective import Objective, token_loss
from maxmeg.optim.build import make_optimizer
from maxmeg.parallel.mesh import make_mesh
from maxmeg.runtime.faults.rerun import with_rerun
from maxmeg.runtime.metrics.memory import CompiledStep, print_memory
from maxmeg.state import abstract_state
from maxmeg.step import make_train_step


class Program:
    """The training and the evaluation step of a valid configuration, on all devices.

    compute_copy: the model -> the copy of it that eval_step reads for all batches of an evaluation.
    traced_step: the training step, jitted and not compiled yet.
    abstract: the state's shapes, dtypes and shardings. rows: batch size -> the rows of the global
    batch that this process reads.
    """

    def __init__(
        self, config: Config, byte_lengths: np.ndarray | None, objective: Objective | None = None
    ) -> None:
        """byte_lengths: bytes of the text of each token id, [V], for cross entropy per byte; losses
        of one's own are not divided by bytes. objective: None means the one of data.objective."""
        sizes = axis_sizes(config.parallel, jax.device_count())
        self.mesh = make_mesh(sizes, fold=config.parallel.fold)
        sizes = config.train.micro_batch_size, config.parallel.context_chunks
        self.rows = local_rows(self.mesh, *sizes, config.data.max_targets)
        width = config.model.width_multiplier
        self.optimizer = make_optimizer(config.optim, self.mesh, config.parallel.zero1, width)
        self.abstract = abstract_state(config, self.optimizer, self.mesh)
        step = make_train_step(config, self.mesh, self.optimizer, self.abstract, objective)
        self.traced_step, self.train_step = step, CompiledStep(step, print_memory)
        if config.train.rerun_bad_steps:
            self.train_step = with_rerun(self.train_step)
        self.compute_copy = make_compute_copy(config, self.mesh, self.abstract.model)
        counted = byte_lengths if objective is None or objective.loss is token_loss else None
        self.eval_step = make_eval_step(config, self.mesh, self.abstract.model, counted, objective)
