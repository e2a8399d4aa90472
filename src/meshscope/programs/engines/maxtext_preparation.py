"""Prepares a worker process for MaxText, before that is imported."""

import os

from meshscope.plans.experiment import Experiment
from meshscope.programs.engines.stubs import install_stubs

# Imported by MaxText 0.2.5 and not installed with it: tokenizers, checkpoints of other formats, images,
# and training of other kinds. None is used in a lowered program.
MISSING = (
    "PIL",
    "drjax",
    "huggingface_hub",
    "jaxtyping",
    "jinja2",
    "pathwaysutils",
    "sentencepiece",
    "sympy",
    "tiktoken",
    "tokenizers",
    "transformers",
)
# Its own modules that read and write checkpoints.
CHECKPOINTS = ("maxtext.checkpoint_conversion", "maxtext.common.checkpointing")

ENVIRONMENT = {"DECOUPLE_GCLOUD": "TRUE"}  # no clients of Google Cloud


def prepare_maxtext(experiment: Experiment) -> None:
    """Sets MaxText's environment variables and makes its imports work."""
    del experiment
    os.environ.update(ENVIRONMENT)
    install_stubs(MISSING, replaced=CHECKPOINTS)
