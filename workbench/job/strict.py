"""Kinds of values in a job file, and how strictly its records are read."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, le=10_000_000, strict=True)]
Items = Annotated[int, Field(ge=0, le=10_000, strict=True)]  # of one modality in one sample
Positive = Annotated[float, Field(gt=0, le=1e15)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[Positive, Field(le=86_400)]  # of a clip or a video


class Strict(BaseModel):
    """Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
