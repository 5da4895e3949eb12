"""A rank's stages with sharded weights: executes their all-gathers and reduce-scatters."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor, nn

from runtime.step.activations import Watched
from runtime.step.flat_part import FlatPart
from runtime.step.fsdp.weights import InFlight, ShardedWeights
from runtime.step.stage_module import StageModule
from runtime.step.timing import Recorder
from runtime.world.clock import Awaited, Channel, Stamp, Traffic
from runtime.world.mesh import Mesh
from workbench.plan.lowered import Weights
from workbench.plan.shard_unit import ShardUnit
from workbench.schedule.action import REDUCTIONS, STEP, Action, Pass
from workbench.schedule.sharded import waits_of
from workbench.trace import Lane


@dataclass(frozen=True, slots=True)
class _Started:
    """An exchange in flight; the ends of its parts are recorded in order."""

    start: Stamp
    parts: list[tuple[ShardedWeights, InFlight]]
    ends: list[Stamp] = field(default_factory=list)

    def end(self, now: Stamp) -> Stamp:
        """End of its last part; `now` if some are unknown, as gloo does not report a reduce-scatter's end."""
        if not self.parts:
            return self.start
        return self.ends[-1] if len(self.ends) == len(self.parts) else now


class ShardedStages:
    """Weights of one rank's stages that are sharded among ranks.

    Gathers and reductions overlap the passes. An action waits for those in `waits_of`, as in the simulator. A
    reduction over replicas of a stage that reduces once does not: it follows its reduce-scatter beside the
    passes, see `ShardedGradients`.
    Differs: torch's `fully_shard` reduces only weights with a gradient, so a replica without items in a round
    would block its peers; and its hooks order collectives, not the program.

    Args:
        units: stage -> its unit, of the whole plan.
        mesh: of this rank.
        wide: type of the optimizer's copy; None: the weights' own type.
        kept: stages whose weights stay gathered for more than a pass.
    """

    def __init__(
        self,
        units: Mapping[int, ShardUnit],
        mesh: Mesh,
        *,
        wide: torch.dtype | None = None,
        kept: Collection[int] = (),
    ) -> None:
        self._units, self._mesh, self._wide, self._kept = units, mesh, wide, kept
        self._held: dict[int, dict[str, ShardedWeights]] = {}
        self._known: dict[Weights, ShardedWeights] = {}
        self._started: dict[Action, _Started] = {}
        self._waits: dict[Action, tuple[Action, ...]] = {}
        self._beside: dict[Action, tuple[Action, ...]] = {}
        self._recorder: Recorder | None = None
        self.memory: Watched | None = None

    @classmethod
    def none(cls) -> "ShardedStages":
        """An instance for a rank that shards nothing."""
        return cls({}, Mesh(rank=0, ranks=(0,), device=torch.device("cpu")))

    def __contains__(self, stage: object) -> bool:
        return stage in self._units

    def building(self, build: Callable[..., StageModule]) -> Callable[..., StageModule]:
        """A builder that shards each stage after `build`, so that at most one is ever whole."""
        return lambda *args, **kwargs: self.take(build(*args, **kwargs))

    def take(self, module: StageModule) -> StageModule:
        """Shard a stage's weights, if the plan says so; returns the module."""
        stage = module.stage.id
        if stage not in self._units:
            return module
        kinds: dict[str, tuple[list[Weights], list[nn.Parameter]]] = {}  # in the order of `ShardUnit`
        in_order = sorted(module.weights().items(), key=lambda pair: (pair[0].experts, bool(pair[0].shared)))
        for is_trained, (weights, parameters) in product((True, False), in_order):
            chosen = [each for each in parameters if each.requires_grad is is_trained]
            if chosen:
                names, of_kind = kinds.setdefault(_kind(weights, is_trained=is_trained), ([], []))
                names.append(weights)
                of_kind.extend(chosen)
        self._held[stage] = {
            kind: self._flat(module, names, parameters) for kind, (names, parameters) in kinds.items()
        }
        return module

    def _flat(
        self, module: StageModule, names: Sequence[Weights], parameters: Sequence[nn.Parameter]
    ) -> ShardedWeights:
        """Some weights of a stage as one tensor; a tied one, one per stage, has the same part in all."""
        mesh, unit = self._mesh, self._units[module.stage.id]
        ranks = unit.sharers(mesh.rank, experts=names[0].experts)
        group = mesh.units.get(ranks)  # none where weights are only stored, not used
        like = None if names[0].shared is None else self._known.get(names[0])
        flat = ShardedWeights(
            parameters,
            ranks,
            mesh.rank,
            group,
            wide=self._wide,
            like=like,
            resized=self._resize,
            shared=module.shared,
        )
        for name in names:
            self._known.setdefault(name, flat)
        return flat

    def _resize(self, num_bytes: int) -> None:
        if self.memory is not None:
            self.memory.resize(num_bytes)

    def follow(self, program: Sequence[Action], once: Collection[int], recorder: Recorder) -> None:
        """Execute the exchanges of this program from now on; `once`: stages that reduce once a step."""
        self._recorder = recorder
        self._waits, self._beside = {}, {}
        for action, awaited in waits_of(program, once).items():
            is_beside = action.kind in REDUCTIONS and action.stage in once
            (self._beside if is_beside else self._waits)[action] = awaited

    def start(self, action: Action) -> None:
        """Start an ALL_GATHER or a REDUCE_SCATTER."""
        assert action.stage is not None
        weights_of_stage, start = self._sharded_in(action.stage), self._mesh.clock.stamp()
        if action.kind is Pass.ALL_GATHER:
            traffic, parts = Traffic.GATHER, [(weights, weights.gather()) for weights in weights_of_stage]
        else:
            trained = [weights for weights in weights_of_stage if weights.is_trained]
            traffic, parts = Traffic.SCATTER, [(weights, weights.reduce_scatter()) for weights in trained]
            for weights in self._held[action.stage].values():
                if weights.is_trained and not weights.is_sharded:
                    weights.keep_gradient()
        self._started[action] = started = _Started(start, parts)
        for weights, in_flight in parts:
            is_sum = in_flight.summed is not None
            channel = Channel(Traffic.SUM if is_sum else traffic, weights.ranks)
            awaited = self._awaited(action, weights)
            self._mesh.clock.follow(in_flight.work, channel, awaited, started.ends.append)

    def _sharded_in(self, stage: int) -> list[ShardedWeights]:
        """The weights of a stage of which other ranks hold parts."""
        return [weights for weights in self._held.get(stage, {}).values() if weights.is_sharded]

    def accumulate(self) -> None:
        """After a backward, add gradients to the wide sums of weights that stay for several of them."""
        for stage, by_name in self._held.items():
            if stage in self._kept:
                for weights in by_name.values():
                    if weights.is_trained and not weights.is_updated_in_place:
                        weights.accumulate()

    def release(self, stage: int) -> None:
        """FREE: keep only this rank's part."""
        for weights in self._sharded_in(stage):
            weights.release()

    def wait_for(self, action: Action) -> None:
        """Wait for the exchanges on which an action depends.

        Raises:
            RankError: an exchange did not end in time, or a peer is gone.
        """
        for name in self._waits.get(action, ()):
            self._finish(name)

    def is_beside(self, action: Action) -> bool:
        """Whether it is a reduction over replicas that follows its reduce-scatter beside the passes."""
        return action in self._beside

    def can_follow(self, reduction: Action) -> bool:
        """Whether a reduction over replicas can be started without a wait for its reduce-scatter."""
        started = [self._started[name] for name in self._beside.get(reduction, ()) if name in self._started]
        works = [in_flight.work for each in started for _, in_flight in each.parts]
        return all(map(self._mesh.clock.can_follow, works))

    def finish_before(self, reduction: Action, channel: Channel) -> None:
        """Let the current stream, that of a channel, wait for the reduce-scatter of a reduction's stage."""
        for name in self._beside.get(reduction, ()):
            started = self._started.get(name)
            for _, in_flight in () if started is None else started.parts:
                for tensor in (in_flight.flat, in_flight.part):
                    assert tensor is not None
                    self._mesh.clock.record_stream(tensor, channel)
            self._finish(name)

    def _finish(self, name: Action) -> None:
        started = self._started.pop(name, None)
        if started is None:
            return
        for weights, in_flight in started.parts:
            self._wait(in_flight, name, weights)
            received = in_flight.received()
            if received is not None:
                weights.add(received)
            in_flight.free_inputs()
        if self._recorder is not None:
            self._recorder.span(Lane.REDUCE, name, started.start, started.end(self._mesh.clock.stamp()))

    def _wait(self, in_flight: InFlight, name: Action, weights: ShardedWeights) -> None:
        self._mesh.clock.wait(in_flight.work, self._awaited(name, weights))

    def _awaited(self, name: Action, weights: ShardedWeights) -> Awaited:
        return Awaited.among(self._mesh.rank, f"in {name}", weights.ranks)

    def finish(self) -> None:
        """At STEP, wait for all exchanges, and set missing gradients of parts to zero."""
        self.wait_for(STEP)
        for weights in self._distinct():
            weights.gradient()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the optimizer: this rank's part of all trained weights, each once."""
        yield from (weights.own for weights in self._distinct())

    def flat_parts(self) -> Iterator[FlatPart]:
        """The same as parts of flat tensors."""
        yield from (weights.flat_part() for weights in self._distinct())

    def parts_of(self, stage: int) -> dict[str, nn.Parameter]:
        """Description -> this rank's part of each flat tensor of a stage."""
        return {
            f"{name}, part {weights.ranks.index(self._mesh.rank) + 1} of {len(weights.ranks)}": weights.own
            for name, weights in self._held[stage].items()
        }

    def holding(self, weights: Weights) -> ShardedWeights | None:
        """The flat tensor with some weights; None where this rank does not have them."""
        return self._known.get(weights)

    def _distinct(self) -> list[ShardedWeights]:
        """Trained weights; of tied ones the first."""
        all_weights = (weights for by_name in self._held.values() for weights in by_name.values())
        trained = (weights for weights in all_weights if weights.is_trained)
        first_of_part: dict[int, ShardedWeights] = {}
        for weights in trained:
            first_of_part.setdefault(id(weights.own), weights)
        return list(first_of_part.values())

    def publish(self) -> None:
        """Update the gathered parts after the optimizer's step."""
        for weights in self._distinct():
            weights.publish()

    def whole_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (weight, its whole gradient) of all stages; a collective."""
        for stage in sorted(self._held, key=lambda stage: self._units[stage].stages):
            for weights in self._held[stage].values():
                if not weights.is_trained:
                    continue
                flat_N = weights.gradient()
                if weights.is_sharded:
                    in_flight = weights.start_whole_gradient()
                    self._wait(in_flight, Action(stage, Pass.REDUCE_SCATTER), weights)
                    assert in_flight.flat is not None
                    flat_N = in_flight.flat
                yield from weights.pieces(flat_N)

    def each_gathered(self, modules: Iterable[StageModule]) -> Iterator[StageModule]:
        """Yield the rank's stages, each with its weights gathered until the next one; a collective.

        Sharded ones come last, in the same order on all ranks that share them.
        """

        def place(module: StageModule) -> tuple[int, ...]:
            unit = self._units.get(module.stage.id)
            return () if unit is None else unit.stages

        for module in sorted(modules, key=place):
            stage = module.stage.id
            for weights in self._sharded_in(stage):
                self._wait(weights.gather(), Action(stage, Pass.ALL_GATHER), weights)
            yield module
            for weights in self._sharded_in(stage):
                weights.release()

    def parts(self) -> dict[str, Tensor]:
        """Name -> tensor of this rank that no optimizer updates directly."""
        parts: dict[str, Tensor] = {}
        for stage, by_name in self._held.items():
            own_parts = (weights.part for weights in by_name.values() if not weights.is_updated_in_place)
            parts |= {f"part/{stage}/{number}": part for number, part in enumerate(own_parts)}
        return parts


def _kind(weights: Weights, *, is_trained: bool) -> str:
    """Which flat tensor of its stage holds some weights."""
    if weights.shared is not None:
        return f"tied {weights.shared}"
    return f"{'trained' if is_trained else 'frozen'}{' experts' if weights.experts else ''}"
