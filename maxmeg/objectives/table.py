"""The objective of each value of data.objective."""

from maxmeg.config import data
from maxmeg.objectives.classification import CHOICE, CLASSIFICATION
from maxmeg.objectives.contrastive import CONTRASTIVE
from maxmeg.objectives.language_modelling import LANGUAGE_MODELLING
from maxmeg.objectives.masked import MASKED
from maxmeg.objectives.objective import Objective

OBJECTIVES: dict[data.Objective, Objective] = {
    data.Objective.gpt: LANGUAGE_MODELLING,
    data.Objective.sft: LANGUAGE_MODELLING,
    data.Objective.masked: MASKED,
    data.Objective.classify: CLASSIFICATION,
    data.Objective.tag: CLASSIFICATION,
    data.Objective.choose: CHOICE,
    data.Objective.span_corruption: Objective(),
    data.Objective.seq2seq: Objective(),
    data.Objective.ict: CONTRASTIVE,
    data.Objective.retrieve: CONTRASTIVE,
    data.Objective.retro: Objective(),
}
