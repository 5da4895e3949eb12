"""What a job and each of its plans train: model, samples and settings, whatever their layouts."""

from typing import Protocol

from workbench.data.sample import Sample
from workbench.model.model_graph import ModelGraph
from workbench.plan.plan import Settings


class Trained(Protocol):
    """A job or a plan, as far as no layout matters."""

    @property
    def model(self) -> ModelGraph: ...

    @property
    def batch(self) -> tuple[Sample, ...]: ...

    @property
    def settings(self) -> Settings: ...
