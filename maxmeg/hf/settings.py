"""The settings of a folder with a model, of a run or of Hugging Face. A run's are read without JAX.

This is where --config=finetune:FOLDER, classify:FOLDER and retrieval:FOLDER begin.
"""

import os

from maxmeg.config import files
from maxmeg.config.schema import Config


def settings_of(folder: str) -> Config:
    """Return the settings of a run folder, or those of a run with a Hugging Face folder's model."""
    if not files.is_model_folder(folder):
        return files.load(os.path.join(folder, files.CONFIG_FILE))
    from maxmeg.hf.folder import described_settings  # imports JAX

    return described_settings(folder)


def next_run(folder: str, ending: str) -> str:
    """Return the default folder of a run that begins with the weights in a folder: beside that of a
    run, and below runs/ for a Hugging Face folder."""
    name = os.path.normpath(folder)
    is_run = not files.is_model_folder(folder)
    return f"{name if is_run else os.path.join('runs', os.path.basename(name))}-{ending}"
