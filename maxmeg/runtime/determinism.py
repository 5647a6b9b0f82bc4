"""Check that this machine's GPUs can train deterministically."""

from maxmeg.config.mixers import AttentionBackend
from maxmeg.config.schema import Config
from maxmeg.ops.attention import cudnn as attention_cudnn
from maxmeg.ops.backend import target_device

CUDNN = (AttentionBackend.auto, AttentionBackend.cudnn)


def check_deterministic(config: Config) -> None:
    """ValueError if train.deterministic is set and cuDNN's attention may not be deterministic.

    Every other op and attention backend is deterministic with the flag of `gpu_environment`.
    """
    if not config.train.deterministic or config.model.attention.backend not in CUDNN:
        return
    if reason := attention_cudnn.refuses_determinism(target_device()):
        named = f"model.attention.backend={config.model.attention.backend.value}"
        raise ValueError(
            f"train.deterministic=true with {named}: {reason}; install a newer nvidia-cudnn-cu13 "
            "or set model.attention.backend=xla"
        )
