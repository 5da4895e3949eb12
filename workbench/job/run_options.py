"""Run options, defined once for the flags of `workbench run` and of `torchrun -m runtime.launch`."""

from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from workbench.field_kinds import check_kinds
from workbench.job.device import Device
from workbench.plan.plan import Precision
from workbench.units import S_PER_DAY

MOST_STEPS = 1_000_000
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01  # of a run that says nothing else


class Stands(IntEnum):
    """The position of a flag in a command's help, before the order of fields."""

    FIRST = -1
    IN_ORDER = 0
    LAST = 1


def asked(
    help_text: str,
    *,
    flag: str | None = None,
    bounds: tuple[int, int] | None = None,
    stands: Stands = Stands.IN_ORDER,
) -> dict[str, Any]:
    """Metadata of a field that a flag sets: `flag`, or one with the field's name."""
    return {"help": help_text, "flag": flag, "bounds": bounds, "stands": stands}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """The steps of a run and their start, which a user chooses and every rank receives.

    A repetition starts from fresh weights: `warmup` steps untimed, then `steps`.

    Raises:
        ValueError: values of another kind, or numbers out of bounds.
    """

    steps: int = field(default=1, metadata=asked("number of timed steps", bounds=(1, MOST_STEPS)))
    repetitions: int = field(
        default=1,
        metadata=asked(
            "number of runs, each from fresh weights; default: 1, emulated 3", bounds=(1, MOST_STEPS)
        ),
    )
    warmup: int = field(default=0, metadata=asked("number of untimed warm-up steps", bounds=(0, MOST_STEPS)))
    seed: int = field(default=0, metadata=asked("random seed of weights and data"))
    weights: Path | None = field(
        default=None,
        metadata=asked("checkpoint of a composite model, or folder with a Hugging Face folder per module"),
    )
    export: Path | None = field(
        default=None, metadata=asked("new folder for the trained weights, in the format of --weights")
    )
    timeout_s: float = field(
        default=60.0,
        metadata=asked("limit of every single wait in seconds", flag="--timeout", stands=Stands.LAST),
    )
    precision: Precision | None = field(
        default=None,
        metadata=asked("precision of weights and activations; default: the plan's", stands=Stands.LAST),
    )

    def __post_init__(self) -> None:
        check_kinds(self)
        for option in fields(self):
            bounds, value = option.metadata.get("bounds"), getattr(self, option.name)
            if bounds is not None and value is not None:
                least, most = bounds
                if not least <= value <= most:
                    raise ValueError(f"{option.name} must be {least} to {most:,}, got {value:,}")
        if not 0 < self.timeout_s <= S_PER_DAY:
            raise ValueError(f"timeout must be > 0 s and at most a day, got {self.timeout_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(StepOptions):
    """All options of a run: steps, optimizer, files and the device."""

    learning_rate: float = field(default=LEARNING_RATE, metadata=asked("learning rate of the optimizer"))
    rate_warmup: int = field(
        default=0,
        metadata=asked(
            "first steps, in which the learning rate rises linearly to its value", bounds=(0, MOST_STEPS)
        ),
    )
    rate_decay: int | None = field(
        default=None,
        metadata=asked(
            "steps after --rate-warmup in which the learning rate falls to 0 along a half cosine; "
            "default: it stays",
            bounds=(1, MOST_STEPS),
        ),
    )
    weight_decay: float = field(default=WEIGHT_DECAY, metadata=asked("weight decay of the optimizer"))
    clip_norm: float | None = field(
        default=None, metadata=asked("largest global norm of the gradients; default: they are not clipped")
    )
    trace: Path | None = field(
        default=None, metadata=asked("trace file to write; one per repetition", stands=Stands.FIRST)
    )
    data: str | None = field(
        default=None,
        metadata=asked("data folder, or tcp://HOST:PORT of `preprocess serve`; default: random data"),
    )
    data_keys: Path | None = field(
        default=None, metadata=asked("client keys for a preprocessing server, see `preprocess keys`")
    )
    next_samples: bool = field(
        default=False, metadata=asked("use the next samples of the data in every step")
    )
    job: Path | None = field(
        default=None,
        metadata=asked(
            "job file of the plan, with --next-samples: group samples of each step as the strategy does; "
            "default: keep the positions of the first step"
        ),
    )
    checkpoint: Path | None = field(
        default=None, metadata=asked("folder to save checkpoints to, during the run and at its end")
    )
    checkpoint_every: int = field(default=10, metadata=asked("steps between checkpoints"))
    resume: bool = field(
        default=False, metadata=asked("continue from the latest complete checkpoint in the folder, if any")
    )
    watch_memory: bool = field(
        default=False, metadata=asked("record memory in the traces; slows down the steps")
    )
    device: Device | None = field(
        default=None,
        metadata=asked(
            "device for --emulate; default: a GPU if torch finds one, else the CPU", stands=Stands.LAST
        ),
    )

    @property
    def of_steps(self) -> dict[str, Any]:
        """The values that every rank receives, by name."""
        return {each.name: getattr(self, each.name) for each in fields(StepOptions)}


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of a command line.

    Args:
        field: name of the dataclass field.
        name: as the user types it.
        type: type of the field, with None where the option may be left out.
    """

    field: str
    name: str
    type: Any
    default: Any
    help: str

    @property
    def value_type(self) -> Any:
        """The type of a given value."""
        return next((each for each in get_args(self.type) if each is not type(None)), self.type)


def flags_of(kind: type) -> tuple[Flag, ...]:
    """The flags of a dataclass whose fields are options, in the order of its help."""
    hints = get_type_hints(kind)
    return tuple(
        Flag(
            field=option.name,
            name=option.metadata["flag"] or f"--{option.name.replace('_', '-')}",
            type=hints[option.name],
            default=option.default,
            help=option.metadata["help"],
        )
        for option in sorted(fields(kind), key=lambda option: option.metadata["stands"])
    )


def add_arguments(
    parser: ArgumentParser, kind: type, helps: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Add the flags of a dataclass to an argument parser; `helps` overrides help texts, by field."""
    for flag in flags_of(kind):
        text = helps.get(flag.field, flag.help)
        if flag.type is bool:
            parser.add_argument(flag.name, dest=flag.field, action="store_true", help=text)
            continue
        choices = list(flag.value_type) if issubclass(flag.value_type, StrEnum) else None
        parser.add_argument(
            flag.name,
            dest=flag.field,
            type=flag.value_type,
            default=flag.default,
            choices=choices,
            metavar=None if choices else flag.name.removeprefix("--").replace("-", "_").upper(),
            help=text,
        )
