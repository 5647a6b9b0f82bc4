"""A run described by a YAML file, which may name only the fields that differ from the defaults.

    python -m maxmeg.train --config=configs/yaml.py:run.yaml

Every run saves RUN_DIR/config.yaml; giving that file here starts or resumes the same run.
"""

from maxmeg.config import files
from maxmeg.config.schema import Config


def get_config(path: str = "") -> Config:
    if not path:
        raise ValueError("which YAML file? write --config=configs/yaml.py:FILE.yaml")
    return files.load(path)
