"""A rank's stages whose weights are sharded: does the exchanges of their rounds as the program says."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from runtime.step.activations import Watched
from runtime.step.fsdp.weights import ShardedWeights, Travelling
from runtime.step.stage_module import StageModule
from runtime.step.timing import Recorder
from runtime.world.clock import Awaited, Channel, Stamp, Traffic
from runtime.world.mesh import Mesh
from workbench.plan.lowered import Weights
from workbench.plan.parameter_shards import ShardUnit
from workbench.schedule.action import STEP, Action, Pass
from workbench.schedule.sharded import waits_of
from workbench.trace import Lane


@dataclass(frozen=True, slots=True)
class _Started:
    """An exchange that has begun; whoever sees a part of it end notes when, in the order of their ends."""

    start: Stamp
    parts: list[tuple[ShardedWeights, Travelling]]
    ends: list[Stamp] = field(default_factory=list)

    def end(self, now: Stamp) -> Stamp:
        """When its last part ended; `now`, where not all were noted: gloo's reduce-scatter cannot tell."""
        if not self.parts:
            return self.start
        return self.ends[-1] if len(self.ends) == len(self.parts) else now


class ShardedStages:
    """Weights of one rank's stages that it shares with others.

    Gathers and reductions run beside the passes. At an action the rank waits for those that `waits_of`
    names; the simulator waits for the same.
    Differs: torch's `fully_shard` reduces only weights that got a gradient, so a replica without items
    in a round would leave its peers waiting; and its hooks order collectives, not the program.

    Args:
        units: stage -> its unit, of the whole plan.
        mesh: of this rank.
        wide: what the optimizer works in; None: the weights' own type.
    """

    def __init__(
        self,
        units: Mapping[int, ShardUnit],
        mesh: Mesh,
        *,
        wide: torch.dtype | None = None,
    ) -> None:
        self._units, self._mesh, self._wide = units, mesh, wide
        self._held: dict[int, dict[str, ShardedWeights]] = {}
        self._known: dict[Weights, ShardedWeights] = {}
        self._started: dict[Action, _Started] = {}
        self._waits: dict[Action, tuple[Action, ...]] = {}
        self._recorder: Recorder | None = None
        self.memory: Watched | None = None

    @classmethod
    def none(cls) -> "ShardedStages":
        """Of a rank that shards nothing."""
        return cls({}, Mesh(rank=0, ranks=(0,), device=torch.device("cpu")))

    def __contains__(self, stage: object) -> bool:
        return stage in self._units

    def building(self, build: Callable[..., StageModule]) -> Callable[..., StageModule]:
        """Builds stages as `build` does and takes each, so that one alone is ever whole."""
        return lambda *given, **how: self.take(build(*given, **how))

    def take(self, module: StageModule) -> StageModule:
        """Share out a stage's weights, where the plan says so; returns the module."""
        stage = module.stage.id
        if stage not in self._units:
            return module
        ranks = self._units[stage].ranks
        found: dict[str, ShardedWeights] = {}
        own: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        names: list[Weights] = []
        tied: list[tuple[Weights, list[nn.Parameter]]] = []
        for weights, held in module.weights().items():
            if weights.shared is None:
                names.append(weights)
                for parameter in held:
                    own[parameter.requires_grad].append(parameter)
            else:
                tied.append((weights, list(held)))
        for is_trained, name in ((True, "trained"), (False, "frozen")):
            if own[is_trained]:
                found[name] = self._sharded_parameters(own[is_trained], ranks, None)
                if is_trained:
                    self._known |= dict.fromkeys(names, found[name])
            for weights, held in tied:
                if held[0].requires_grad is is_trained:
                    one = self._sharded_parameters(held, ranks, self._known.get(weights))
                    found[f"tied {weights.shared}"] = one  # each stage's own, of one part
                    self._known.setdefault(weights, one)
        self._held[stage] = found
        return module

    def _sharded_parameters(
        self, held: Sequence[nn.Parameter], ranks: tuple[int, ...], like: ShardedWeights | None
    ) -> ShardedWeights:
        mesh, resized = self._mesh, self._resize
        group = mesh.units.get(ranks)  # none where weights are only kept, not used
        return ShardedWeights(held, ranks, mesh.rank, group, wide=self._wide, like=like, resized=resized)

    def _resize(self, num_bytes: int) -> None:
        if self.memory is not None:
            self.memory.resize(num_bytes)

    def follow(self, program: Sequence[Action], recorder: Recorder) -> None:
        """From now on do this program's rounds."""
        self._waits, self._recorder = waits_of(program), recorder

    def start(self, action: Action) -> None:
        """Begin an ALL_GATHER or a REDUCE_SCATTER."""
        assert action.stage is not None
        held, start = self._held[action.stage], self._mesh.clock.stamp()
        if action.kind is Pass.ALL_GATHER:
            traffic, parts = Traffic.GATHER, [(weights, weights.gather()) for weights in held.values()]
        else:
            trained = (weights for weights in held.values() if weights.is_trained)
            traffic, parts = Traffic.SCATTER, [(weights, weights.reduce_scatter()) for weights in trained]
        self._started[action] = started = _Started(start, parts)
        channel = Channel(traffic, self._units[action.stage].ranks)
        for _, travelling in parts:
            self._mesh.clock.follow(travelling.work, channel, self._awaited(action), started.ends.append)

    def let_go(self, stage: int) -> None:
        """FREE: only this rank's part stays."""
        for weights in self._held[stage].values():
            weights.let_go()

    def wait_for(self, action: Action) -> None:
        """Wait for what an action needs.

        Raises:
            RankError: an exchange did not end in time, or a peer is gone.
        """
        for name in self._waits.get(action, ()):
            self._finish(name)

    def _finish(self, name: Action) -> None:
        started = self._started.pop(name, None)
        if started is None:
            return
        for weights, travelling in started.parts:
            self._wait(travelling, name)
            if travelling.part is not None:
                weights.add(travelling.part)
        if self._recorder is not None:
            self._recorder.span(Lane.REDUCE, name, started.start, started.end(self._mesh.clock.stamp()))

    def _wait(self, travelling: Travelling, name: Action) -> None:
        self._mesh.clock.wait(travelling.work, self._awaited(name))

    def _awaited(self, name: Action) -> Awaited:
        assert name.stage is not None
        return Awaited.among(self._mesh.rank, f"in {name}", self._units[name.stage].ranks)

    def finish(self) -> None:
        """At STEP: all exchanges have ended, and every part has a gradient, zeros where none was made."""
        self.wait_for(STEP)
        for weights in self._distinct():
            weights.gradient()

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizer updates: this rank's part of everything trained, each once."""
        yield from (weights.own for weights in self._distinct())

    def parts_of(self, stage: int) -> dict[str, nn.Parameter]:
        """This rank's part of each tensor that a stage is gathered from, by what and which part it is."""
        ranks = self._units[stage].ranks
        which = f"part {ranks.index(self._mesh.rank) + 1} of {len(ranks)}"
        return {f"{name}, {which}": weights.own for name, weights in self._held[stage].items()}

    def gradient_of(self, weights: Weights) -> Tensor | None:
        """[S] this rank's part of the gradient of some weights; None where they are not held here."""
        held = self._known.get(weights)
        return None if held is None else held.gradient()

    def _distinct(self) -> list[ShardedWeights]:
        """Trained ones; of tied ones the first."""
        all_held = (weights for held in self._held.values() for weights in held.values())
        trained = (weights for weights in all_held if weights.is_trained)
        found: dict[int, ShardedWeights] = {}
        for weights in trained:
            found.setdefault(id(weights.own), weights)
        return list(found.values())

    def publish(self) -> None:
        """After the optimizer's step."""
        for weights in self._distinct():
            weights.publish()

    def whole_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(Weight, its whole gradient) of all stages; a collective."""
        for stage in sorted(self._held, key=lambda stage: self._units[stage].stages):
            for weights in self._held[stage].values():
                if weights.is_trained:
                    travelling = weights.start_whole_gradient()
                    self._wait(travelling, Action(stage, Pass.REDUCE_SCATTER))
                    assert travelling.flat is not None
                    yield from weights.pieces(travelling.flat)

    def each_whole(self, modules: Iterable[StageModule]) -> Iterator[StageModule]:
        """The rank's stages, each with its weights whole until the next one; a collective.

        Sharded ones come last, as all ranks that share them list them.
        """

        def place(module: StageModule) -> tuple[int, ...]:
            unit = self._units.get(module.stage.id)
            return () if unit is None else unit.stages

        for module in sorted(modules, key=place):
            stage = module.stage.id
            for weights in self._held.get(stage, {}).values():
                self._wait(weights.gather(), Action(stage, Pass.ALL_GATHER))
            yield module
            for weights in self._held.get(stage, {}).values():
                weights.let_go()

    def parts(self) -> dict[str, Tensor]:
        """By name, what this rank keeps that no optimizer holds."""
        found: dict[str, Tensor] = {}
        for stage, held in self._held.items():
            kept = (weights.part for weights in held.values() if not weights.is_updated_in_place)
            found |= {f"part/{stage}/{number}": part for number, part in enumerate(kept)}
        return found
