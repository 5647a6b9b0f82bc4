"""Where the samples of a run come from: the corpora that its settings name, or Python objects."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from maxmeg.config.schema import Config
from maxmeg.data.build import build_validation, open_corpus, open_split, samples_asked
from maxmeg.data.inspect.composition import print_data
from maxmeg.data.resuming import warn_of_order
from maxmeg.data.samples.dataset import Dataset, RecordedDataset
from maxmeg.data.samples.sampling import check_epochs
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.optim.schedules import Schedules
from maxmeg.processes import multihost


class Source(Protocol):
    """What a run reads.

    open: the training set and the validation sets by name. step and metadata are those of the
    checkpoint that is resumed, 0 and empty for a new run.
    """

    tokenizer: Tokenizer

    def open(
        self, config: Config, schedules: Schedules, step: int, metadata: Mapping[str, Any]
    ) -> tuple[Dataset, dict[str, Dataset]]: ...


@dataclasses.dataclass
class Datasets:
    """Datasets made in Python. Sample n of a set must be the same in every process and run; with
    data.num_workers > 0 a set must be picklable."""

    tokenizer: Tokenizer
    train: Dataset
    validation: dict[str, Dataset] = dataclasses.field(default_factory=dict)

    def open(self, config, schedules, step, metadata) -> tuple[Dataset, dict[str, Dataset]]:
        return self.train, self.validation


class Corpora:
    """The corpora that the settings in `config.data` name."""

    def __init__(self, config: Config) -> None:
        self.tokenizer, self._prefixes = open_corpus(config.data, config.run_dir)

    def open(
        self, config: Config, schedules: Schedules, step: int, metadata: Mapping[str, Any]
    ) -> tuple[Dataset, dict[str, Dataset]]:
        """Open the sets, with the samples in the order that the checkpoint kept; print them."""
        saved = metadata.get("data_order")
        num_samples = [samples_asked(config, split, schedules, saved or ()) for split in (0, 1)]
        place = self._prefixes, self.tokenizer
        train = open_split(config, *place, 0, num_samples[0])
        assert isinstance(train, RecordedDataset)  # an empty training split is an error
        check_epochs(schedules.total_samples / train.samples_per_epoch, config.data.max_epochs)
        validation = build_validation(config, *place, num_samples[1])
        if multihost.is_primary():
            warn_of_order(saved, train, schedules.consumed_samples(step))
            named = {f"validation {name}".rstrip(): data for name, data in validation.items()}
            print_data(config, *place, {"train": train, **named}, schedules)
        return train, validation
