"""Input and output of DistTrain's orchestration: units, pools of GPUs, degrees, seconds."""

from dataclasses import dataclass
from enum import Enum
from math import inf


class Cut(Enum):
    """How a unit is cut into stages: equal parts, as in the source, or whole layers, taken to be equal."""

    EQUAL = "equal"
    LAYERS = "layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module that has tp, dp and pp of its own: an encoder, the LLM or a generator.

    Args:
        name: of the module.
        sample_s: (tp, seconds) of forward and backward of the whole module over one sample.
        num_layers: the most stages it can be cut into.
        weight_bytes: weights and gradients of the whole module (P).
        optimizer_bytes: optimizer state of the whole module (S), spread over all its GPUs.
        activation_bytes: of one sample across the whole module (L / M).
        max_gpus: that it may use; None: what the others leave.
        reduction_bytes: that one GPU holding the whole module moves after a step in the limit of many
            peers: gradients out and weights in.
        pool: of the task that its GPUs come from; its seconds are of that kind of GPU.
        stages_behind: of later units, whose microbatches its first stage holds besides its own; see
            `orchestration.depth`. The source has 0.
        update_s: (tp, seconds) of the optimizer's update of the whole module by one GPU of each tp group;
            stages share it, and replicas where they share optimizer state. The source has none.
    """

    name: str
    sample_s: tuple[tuple[int, float], ...]
    num_layers: int
    weight_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    activation_bytes: float = 0.0
    max_gpus: int | None = None
    reduction_bytes: float = 0.0
    pool: str = ""
    stages_behind: int = 0
    update_s: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.sample_s or min(tp for tp, _ in self.sample_s) < 1 or self.num_layers < 1:
            raise ValueError(f"unit {self.name!r}: want a time for some tp >= 1 and >= 1 layer, got {self}")
        if min(seconds for _, seconds in self.sample_s) < 0:
            raise ValueError(f"unit {self.name!r}: times must be >= 0, got {self.sample_s}")

    def updated_s(self, tp: int, dp: int, pp: int) -> float:
        """Return the seconds of the update on one GPU under these degrees."""
        return dict(self.update_s).get(tp, 0.0) / (pp * (dp if self.optimizer_bytes else 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """GPUs of one kind.

    Args:
        name: of the pool.
        num_gpus: of it.
        gpu_bytes: memory of one.
        gpu_bytes_per_s: of the fabric, one GPU's part.
        dollars_per_hour: of one GPU.
    """

    name: str
    num_gpus: int
    gpu_bytes: float = inf
    gpu_bytes_per_s: float = inf
    dollars_per_hour: float = 0.0

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.dollars_per_hour < 0:
            raise ValueError(f"pool {self.name!r}: want >= 1 GPU and >= 0 dollars per hour, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A training task: units, batch and GPUs.

    Args:
        units: in pipeline order.
        pacing: name of the unit whose data-parallel degree sets the number of microbatches: the LLM.
        batch_samples: BS.
        microbatch_samples: M, per replica of the pacing unit.
        num_gpus: N.
        gpu_bytes: memory of one.
        virtual_stages: VPP size; divides the warm-up.
        gpu_bytes_per_s: of the fabric, one GPU's part.
        cut: of units into stages.
        pools: kinds of GPUs, together num_gpus, in place of `gpu_bytes` and `gpu_bytes_per_s`
            (DistTrain, section 8). Empty: all GPUs are alike.
    """

    units: tuple[Unit, ...]
    pacing: str
    batch_samples: int
    microbatch_samples: int
    num_gpus: int
    gpu_bytes: float = inf
    virtual_stages: int = 1
    gpu_bytes_per_s: float = inf
    cut: Cut = Cut.EQUAL
    pools: tuple[Pool, ...] = ()

    def __post_init__(self) -> None:
        _check_pools(self)
        names = [unit.name for unit in self.units]
        if self.pacing not in names or len(set(names)) < len(names):
            raise ValueError(f"units must differ and include the pacing one, got {names} and {self.pacing!r}")
        if min(self.microbatch_samples, self.num_gpus, self.virtual_stages) < 1:
            raise ValueError(
                "want >= 1 sample a microbatch, >= 1 GPU and >= 1 virtual stage, got "
                f"{self.microbatch_samples}, {self.num_gpus} and {self.virtual_stages}"
            )
        if self.batch_samples < 1 or self.batch_samples % self.microbatch_samples:
            raise ValueError(
                f"the batch must be a multiple of the microbatch of {self.microbatch_samples} samples, "
                f"got {self.batch_samples}"
            )

    def pool(self, unit: Unit) -> Pool:
        """Return the pool of a unit's GPUs."""
        return next((pool for pool in self.pools if pool.name == unit.pool), self._all)

    @property
    def _all(self) -> Pool:
        return Pool(
            name="",
            num_gpus=self.num_gpus,
            gpu_bytes=self.gpu_bytes,
            gpu_bytes_per_s=self.gpu_bytes_per_s,
        )


def _check_pools(task: Task) -> None:
    names = [pool.name for pool in task.pools] or [""]
    for unit in task.units:
        if unit.pool not in names:
            raise ValueError(f"unit {unit.name!r}: no pool {unit.pool!r}; there are {', '.join(names)}")
    total = sum(pool.num_gpus for pool in task.pools)
    if task.pools and (total != task.num_gpus or len(set(names)) < len(names)):
        raise ValueError(f"pools must differ and have {task.num_gpus} GPUs together, got {total} in {names}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Parallel degrees of one unit."""

    tp: int
    dp: int
    pp: int

    @property
    def num_gpus(self) -> int:
        return self.tp * self.dp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Orchestration:
    """Degrees of every unit, in the task's order, and their times by the formula."""

    degrees: tuple[Degrees, ...]
    warmup_s: float
    steady_s: float
    reduction_s: float

    @property
    def iteration_s(self) -> float:
        return self.warmup_s + self.steady_s + self.reduction_s

    @property
    def num_gpus(self) -> int:
        return sum(degrees.num_gpus for degrees in self.degrees)
