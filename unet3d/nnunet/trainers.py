"""Which of nnU-Net's trainers keep the network that a plan describes."""

import logging
import re
from functools import cache

logger = logging.getLogger(__name__)

USUAL = "nnUNetTrainer"

_TRAINING = re.compile(
    r"Benchmark|noDataLoading|[0-9]+ep(ochs?)?"
    r"|DA5|(DA)?(Seg)?[oO]rd0|noDummy2DDA|NoDA|NoMirroring|onlyMirror01"
    r"|warmup|CosAnneal|(Vanilla)?Ada[mn]|[0-9]en[0-9]"
    r"|Dice|CE|Top[kK]10|LS01|Loss|noSmooth|NoDeepSupervision"
    r"|probabilisticOversampling|0[0-9]{2}|BS[0-9]+|_"
)
"""What the names of trainers are made of that change only the training."""


def keeps_network(trainer: str) -> bool:
    """Return whether a trainer, by its name, is one of nnU-Net's that keep the plan's network."""
    usual, found, rest = trainer.replace("nnUNet_Trainer", USUAL, 1).partition(USUAL)
    return bool(found) and not usual and not _TRAINING.sub("", rest)


@cache  # a model has several folds, and each of them is read more than once
def warn_of_trainer(trainer: str, model: str) -> None:
    """Say that a model may need another network than its plan describes; once for each."""
    if not keeps_network(trainer):
        logger.warning(
            "%s was trained by %s, which nnU-Net does not have: if it changes what the plan says "
            "of the network, such as the activation, the segmentations are wrong; compare one with "
            "that of nnU-Net",
            model,
            trainer,
        )
