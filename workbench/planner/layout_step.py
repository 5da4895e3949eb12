"""Estimates seconds and bytes of an optimizer step under a layout without building its plan."""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import NamedTuple, TypeVar

from workbench.arrays import Floats
from workbench.balance.microbatches.pipeline_time import least_pipeline_s, pipeline_s
from workbench.balance.stages.partition import partition
from workbench.cost.group_link import group_link
from workbench.cost.model import CostModel
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.plan.lru_cache import Identity, LruCache
from workbench.planner.boundary_price import received_bytes, regrouped, sent
from workbench.planner.layer_totals import Totals, on_own_ranks, total_of
from workbench.planner.layout_choice import LayoutChoice, LayoutStep, Mode, ModuleChoice
from workbench.planner.module_price import ModulePrices
from workbench.planner.sharded_step import sharded_step
from workbench.timing.price import HOST_BYTES_PER_S

_partition = cache(partition)
Bytes = TypeVar("Bytes", float, Floats)


class ModuleChain(NamedTuple):
    """The stages of a module's pipeline, first to last: the totals of their layers.

    Seconds are those of a pass, including messages, and layers of other modules on the first stage.
    """

    stages: tuple[Totals, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


class Held(NamedTuple):
    """Layers of a module on a rank, and the number of microbatches in flight there."""

    choice: ModuleChoice
    layers: Totals
    in_flight: float


class Account(NamedTuple):
    """Costs of a module's layers on a rank besides its passes; of updates those by AdamW."""

    exposed_s: float
    update_s: float
    state_bytes: float


_PRICES: LruCache[ModulePrices] = LruCache(8)
_STEPS: "LruCache[LayoutSteps]" = LruCache(32)


def steps_of(job: Job, cost: CostModel, *, hides_exchange: bool = True) -> "LayoutSteps":
    """The cached `LayoutSteps` of a job.

    Jobs that differ only in layouts, replicas and schedule share them, except for different windows, which
    decide the samples that a colocated encoder takes together. Jobs that also differ in the microbatch
    size share the prices of modules.
    """
    priced = Identity(cost), Identity(job.model), Identity(job.cluster), Identity(job.batch), job.settings
    key = priced, job.microbatch_samples, job.schedule.window, job.schedule.run_ahead, hides_exchange
    prices = _PRICES.get_or(priced, lambda: ModulePrices(job, cost))
    return _STEPS.get_or(key, lambda: LayoutSteps(job, cost, prices, hides_exchange=hides_exchange)).of(job)


class LayoutSteps:
    """Step times of layouts of one job: 1F1B by its recurrence over the layers' prices.

    Collectives inside layers are part of the passes. Gradients are reduced during the last microbatch's
    backward and weights gathered during the first forward; what exceeds the passes of all layers but one
    is exposed. Of encoders on separate ranks the slowest counts at each depth. Colocated encoders process
    the samples of a window together, or all of a replica's where there is no window.

    Differs: the plan's simulation prices the true microbatches, messages that share a link and each
    gradient group; here a microbatch is a mean one and a stage's exchanges are one.

    Args:
        job: gives cluster, batch, microbatch size and kernels.
        cost: the machine.
        prices: of a job that differs only in microbatches, layouts and schedule; None: computed for the job.
        hides_exchange: whether passes hide what replicas exchange, as above; if not, it comes behind them.
    """

    def __init__(
        self, job: Job, cost: CostModel, prices: ModulePrices | None = None, *, hides_exchange: bool = True
    ) -> None:
        self.job, self.prices = job, prices or ModulePrices(job, cost)
        self._hides_exchange = hides_exchange
        self._chains: dict[tuple[ModuleChoice, int | None], ModuleChain] = {}
        self._accounts: dict[tuple[ModuleChoice, Totals], Account] = {}
        self._llm_s: dict[ModuleChoice, float] = {}
        self._steps: dict[LayoutChoice, LayoutStep] = {}
        self._llm = job.model.llm.name

    def step(self, choice: LayoutChoice) -> LayoutStep:
        """The step under a layout, whether it fits or not.

        Complexity: O(layers + stages x microbatches), besides pricing new layers; then O(1).
        """
        if choice not in self._steps:
            self._steps[choice] = self._step_of(choice)
        return self._steps[choice]

    def of(self, job: Job) -> "LayoutSteps":
        """A copy with the same prices for a job that differs in nothing on which they depend."""
        other = copy(self)
        other.job = job
        return other

    def _step_of(self, choice: LayoutChoice) -> LayoutStep:
        if choice.mode in (Mode.SHARDED, Mode.HYBRID):
            return sharded_step(self.prices, choice, self.job.microbatch_samples)
        return {
            Mode.HOMOGENEOUS: self._homogeneous,
            Mode.COLOCATED: self._colocated,
            Mode.APART: self._apart,
        }[choice.mode](choice)

    def llm_s(self, llm: ModuleChoice) -> float:
        """Seconds of the LLM's pipeline without encoders: a lower bound on the step."""
        key = replace(llm, instances=1)
        if key not in self._llm_s:
            chain = self._chain(llm)
            self._llm_s[key] = pipeline_s(chain.forward_s, chain.backward_s, self._rounds(llm))
        return self._llm_s[key]

    def llm_bound_s(self, llm: ModuleChoice) -> float:
        """A lower bound on `llm_s` without cutting the LLM into stages."""
        return least_pipeline_s(self.passes_s(llm), llm.pp, self._rounds(llm))

    def phases_s(self, encoder: ModuleChoice, llm: ModuleChoice) -> float:
        """Seconds of an encoder's passes over all samples of a replica, added to the LLM's by colocation."""
        samples, calls = self._phases(encoder, llm)
        return calls * self.prices.passes_s(encoder, samples)

    def _phases(self, encoder: ModuleChoice, llm: ModuleChoice) -> tuple[int, float]:
        """Samples that a replica processes between two changes of module, and how often it does so."""
        rounds, per_round = self._rounds(llm), llm.num_replicas * self.job.microbatch_samples
        window = self.job.schedule.window or rounds
        span = min(rounds, max(window, -(-encoder.dp // per_round)))
        return -(-span * per_round // encoder.dp), rounds / span

    def busy_s(self, encoder: ModuleChoice, llm: ModuleChoice) -> float:
        """Busy seconds of an encoder's busiest rank on separate ranks, averaged over its stages."""
        samples, calls = self._calls(encoder, llm)
        return self._rounds(llm) * calls * self.prices.passes_s(encoder, samples) / encoder.pp

    def round_s(self, encoder: ModuleChoice, llm: ModuleChoice) -> float:
        """Seconds of an encoder's round on separate ranks, during which the LLM's pipeline is not busy."""
        samples, calls = self._calls(encoder, llm)
        return math.ceil(calls) * self.prices.passes_s(encoder, samples)

    def _calls(self, encoder: ModuleChoice, llm: ModuleChoice) -> tuple[int, float]:
        """Samples of an encoder's pass on separate ranks, and passes a round; a replica may skip rounds."""
        per_round = llm.num_replicas * self.job.microbatch_samples
        samples = max(1, per_round // encoder.dp)
        return samples, per_round / (encoder.dp * samples)

    def passes_s(self, choice: ModuleChoice) -> float:
        """Seconds of a forward and a backward of all the module's layers over a microbatch."""
        return self.prices.passes_s(choice, self.job.microbatch_samples)

    def joint_s(self, llm: ModuleChoice, encoders_s: Floats) -> Floats:
        """Busy seconds of the busiest rank of one grid for all modules, averaged over its stages.

        Args:
            encoders_s: seconds of all encoders' passes together.
        """
        return self._rounds(llm) * (encoders_s + self.passes_s(llm)) / llm.pp

    def state_fits(self, choice: ModuleChoice) -> bool:
        """Whether the state of the module's mean stage fits in a rank's memory, as every layout needs."""
        return self.state_bytes(choice) <= self.memory_bytes

    def state_bytes(self, choice: ModuleChoice) -> float:
        """Bytes of weights, gradients and optimizer state of the module's mean stage."""
        return self.prices.state_bytes(choice, self.prices.elements(choice)) / choice.pp

    def _homogeneous(self, choice: LayoutChoice) -> LayoutStep:
        samples = self.job.microbatch_samples
        encoded = [Held(encoder, self.prices.total(encoder, samples), 1) for encoder in choice.encoders]
        chain = self._chain(choice.llm, [part.layers for part in encoded])
        rounds = self._rounds(choice.llm)
        ranks = []
        for index, stage in enumerate(chain.stages):
            in_flight = min(len(chain.stages) - index, rounds)
            parts = [Held(choice.llm, stage, in_flight)]
            parts += [part._replace(in_flight=in_flight) for part in encoded if index == 0]
            ranks.append(parts)
        passes_s = pipeline_s(chain.forward_s, chain.backward_s, rounds)
        return self._step(ranks, passes_s, 0.0, _counts(chain))

    def _colocated(self, choice: LayoutChoice) -> LayoutStep:
        chain = self._chain(choice.llm)
        rounds = self._rounds(choice.llm)
        phases = [self._phases(encoder, choice.llm) for encoder in choice.encoders]
        schedule = self.job.schedule
        ahead = 1 if schedule.window is None else 1 + schedule.run_ahead  # windows in flight
        encoded = [
            Held(encoder, self.prices.total(encoder, samples), ahead)
            for encoder, (samples, _) in zip(choice.encoders, phases, strict=True)
        ]
        crossings = [
            regrouped(self.prices, encoder, choice.llm, _counts(chain)) for encoder in choice.encoders
        ]
        boundary_s = float_sum(crossing.before_s + crossing.after_s for crossing in crossings)
        num_bytes = float_sum(
            received_bytes(self.prices, encoder, choice.llm, _counts(chain)) for encoder in choice.encoders
        )
        phases_s = float_sum(self.phases_s(encoder, choice.llm) for encoder in choice.encoders)
        ranks = [
            [Held(choice.llm, stage, min(len(chain.stages) - index, rounds)), *encoded]
            for index, stage in enumerate(chain.stages)
        ]
        passes_s = phases_s + boundary_s + self.llm_s(choice.llm)
        more = [2 * num_bytes, *[0.0] * (len(ranks) - 1)]  # features and their gradients
        if choice.offload:  # encoders' state and the LLM's activations are never resident at once
            moved = float_sum(map(self.prices.moved_bytes, choice.encoders))
            passes_s += moves_s(moved)
            llm_kept_bytes = [llm.in_flight * llm.layers.kept_bytes for llm, *_ in ranks]
            more = [
                extra - min(moved, kept_bytes) for extra, kept_bytes in zip(more, llm_kept_bytes, strict=True)
            ]
        return self._step(ranks, passes_s, boundary_s, _counts(chain), more)

    def _apart(self, choice: LayoutChoice) -> LayoutStep:
        llm = self._chain(choice.llm)
        rounds = self._rounds(choice.llm)
        per_round = choice.llm.num_replicas * self.job.microbatch_samples
        depth = max((encoder.pp for encoder in choice.encoders), default=0)
        forward_s, backward_s = [0.0] * depth, [0.0] * depth
        round_s = [0.0] * depth  # of a whole round, forward and backward
        ranks = []
        boundary_s = 0.0
        for encoder in choice.encoders:
            samples, calls = self._calls(encoder, choice.llm)
            chain = self._chain(encoder, samples=samples)
            crossing = sent(self.prices, encoder, choice.llm, per_round, _counts(llm))
            for index, stage in enumerate(chain.stages):
                position = depth - encoder.pp + index
                ahead_s, behind_s = crossing if position == depth - 1 else (0.0, 0.0)
                forward_s[position] = max(forward_s[position], calls * chain.forward_s[index] + ahead_s)
                backward_s[position] = max(backward_s[position], calls * chain.backward_s[index] + behind_s)
                call_s = chain.forward_s[index] + chain.backward_s[index]
                round_s[position] = max(round_s[position], math.ceil(calls) * call_s + ahead_s + behind_s)
                in_flight = min(depth - position + choice.llm.pp, rounds)
                ranks.append([Held(encoder, stage, max(1.0, calls * in_flight))])
            boundary_s += (crossing.before_s + crossing.after_s) * rounds
        ranks += [
            [Held(choice.llm, stage, min(choice.llm.pp - index, rounds))]
            for index, stage in enumerate(llm.stages)
        ]
        # Replicas that take turns are as fast as their mean, but the LLM waits for one whole forward first,
        # and one whole backward follows its last.
        passes_s = max(
            pipeline_s((*forward_s, *llm.forward_s), (*backward_s, *llm.backward_s), rounds),
            float_sum(round_s) + self.llm_s(choice.llm),
        )
        return self._step(ranks, passes_s, boundary_s, _counts(llm))

    def _step(
        self,
        ranks: Sequence[Sequence[Held]],
        passes_s: float,
        boundary_s: float,
        llm_layers: tuple[int, ...],
        more_bytes: Sequence[float] = (),
    ) -> LayoutStep:
        """The step of ranks that hold these parts; the maximum of each account counts."""
        more = [*more_bytes, *[0.0] * (len(ranks) - len(more_bytes))]
        accounts = [[self._account(part) for part in parts] for parts in ranks]
        return LayoutStep(
            passes_s=passes_s,
            exchange_s=max(float_sum(part.exposed_s for part in parts) for parts in accounts),
            update_s=max(map(self._update_s, ranks, accounts)),
            boundary_s=boundary_s,
            peak_bytes=round(
                max(
                    _held_bytes(parts, accounts_of_rank) + extra
                    for parts, accounts_of_rank, extra in zip(ranks, accounts, more, strict=True)
                )
            ),
            memory_bytes=self.memory_bytes,
            llm_layers=llm_layers,
        )

    def _update_s(self, parts: Sequence[Held], accounts: Sequence[Account]) -> float:
        matrices = [(part.choice, part.layers.held.matrices) for part in parts]
        return float_sum(account.update_s for account in accounts) + self.prices.matrix_updates.seconds(
            matrices
        )

    @property
    def memory_bytes(self) -> int:
        """Memory of the smallest rank."""
        return min(node.memory_bytes for node in self.job.cluster.nodes)

    def _rounds(self, llm: ModuleChoice) -> int:
        """Microbatches of each replica of the LLM."""
        return len(self.job.batch) // (llm.num_replicas * self.job.microbatch_samples)

    def _chain(
        self, choice: ModuleChoice, leading: Sequence[Totals] = (), *, samples: int | None = None
    ) -> ModuleChain:
        """A module's balanced stages, with layers of other modules on the first."""
        key = (replace(choice, instances=1), samples)
        if not leading and key in self._chains:
            return self._chains[key]
        layers = self.prices.layers(choice, samples or self.job.microbatch_samples)
        layers_s = [layer.forward_s + layer.backward_s for layer in layers]
        ahead_s = (
            float_sum(part.forward_s for part in leading),
            float_sum(part.backward_s for part in leading),
        )
        layers_s[0] += float_sum(ahead_s)
        stages = on_own_ranks(
            [total_of(layers[first:last]) for first, last in _partition(tuple(layers_s), choice.pp)]
        )
        hop_s = self._hop_s(choice)
        enters_s = [ahead_s, *[(hop_s, hop_s)] * (len(stages) - 1)]
        chain = ModuleChain(
            stages,
            tuple(stage.forward_s + before_s for stage, (before_s, _) in zip(stages, enters_s, strict=True)),
            tuple(stage.backward_s + after_s for stage, (_, after_s) in zip(stages, enters_s, strict=True)),
        )
        if not leading:
            self._chains[key] = chain
        return chain

    def _hop_s(self, choice: ModuleChoice) -> float:
        """Seconds of a message of activations from one stage to the next."""
        layers = self.job.model.module(choice.module).layers
        tokens = self.prices.sample_tokens(choice.module, layers[0].emits) * self.job.microbatch_samples
        width = layers[0].out_width
        cut = choice.cp * (choice.tp if self.job.settings.divides_tokens(choice.module) else 1)
        num_bytes = tokens / cut * width * self.job.settings.precision.num_bytes
        link = group_link(self.job.cluster, num_ranks=2, stride=choice.tp * choice.cp * choice.num_replicas)
        return self.prices.send_s(num_bytes, link)

    def _account(self, part: Held) -> Account:
        """Exchanges between replicas that no pass hides, update and state; passes of one layer hide none."""
        key = part.choice, part.layers
        if key not in self._accounts:
            choice, layers = key
            exchange = self.prices.exchange(choice, layers.held.trained, layers.held.of_experts)
            share = 1 / layers.num_layers if self._hides_exchange else 1.0
            backward_s, forward_s = layers.backward_s * (1 - share), layers.forward_s * (1 - share)
            reduced_s = max(exchange.reduce_s - backward_s, share * exchange.reduce_s)
            gathered_s = max(exchange.gather_s - forward_s, share * exchange.gather_s)
            self._accounts[key] = Account(
                exposed_s=reduced_s + gathered_s,
                update_s=self.prices.update_s(choice, layers.held),
                state_bytes=self.prices.state_bytes(choice, layers.held),
            )
        return self._accounts[key]


def moves_s(num_bytes: Bytes) -> Bytes:
    """Seconds to move `num_bytes` of colocated encoders to the host and back."""
    return 2 * num_bytes / HOST_BYTES_PER_S


def _held_bytes(parts: Sequence[Held], accounts: Sequence[Account]) -> float:
    """Bytes of state, activations of microbatches in flight, and the largest layer's working memory."""
    total = working = 0.0
    for (_, layers, in_flight), account in zip(parts, accounts, strict=True):
        total += account.state_bytes + in_flight * layers.kept_bytes
        working = max(working, layers.working_bytes)
    return total + working


def _counts(chain: ModuleChain) -> tuple[int, ...]:
    return tuple(stage.num_layers for stage in chain.stages)
