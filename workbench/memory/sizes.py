"""Memory of stages on one rank: the state of their weights, and what a microbatch needs in them."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import TypeVar

import numpy as np

from workbench.arrays import Ints
from workbench.float_sum import float_sum
from workbench.memory.indexer import stage_choice_bytes
from workbench.memory.layer import layer_bytes, layer_split_bytes
from workbench.memory.pass_setting import setting_of
from workbench.memory.setting import Setting
from workbench.memory.stage import StateKind, stage_state
from workbench.memory.stage_bytes import (
    LayerInStage,
    Moment,
    StageBytes,
    StageSplitBytes,
    first_moments,
    stage_bytes,
    stage_split_bytes,
    weight_moments,
)
from workbench.model.frozen import Needs
from workbench.model.layer import Layer
from workbench.model.trained import trainable_parameters
from workbench.plan.contents import contents, contents_and_needs, layer_numbers
from workbench.plan.expert_groups import held_elements
from workbench.plan.gradient_groups import num_replicas
from workbench.plan.kernels import Kernels
from workbench.plan.lowered import Weights
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.optimizer_shards import state_shards
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.recomputed_layers import recomputed_in
from workbench.plan.routing import Routing
from workbench.plan.sequence import token_borders
from workbench.plan.stage import Stage
from workbench.plan.work import row_kinds

Account = TypeVar("Account")
MOST_STAGES = 16_384  # cached, each over a microbatch

_State = Mapping[StateKind, int]  # part -> bytes
_STATES: LruCache[_State] = LruCache(MOST_STAGES)
_SETTINGS: LruCache[Setting] = LruCache(MOST_STAGES)
_KEYS: LruCache[object] = LruCache(MOST_STAGES)
_SUMS: LruCache[StageBytes[int]] = LruCache(MOST_STAGES)
_SPLIT_SUMS: LruCache[StageSplitBytes[int]] = LruCache(MOST_STAGES)


_Grid = tuple[int, int, int, int]


def _grid_of(stage: Stage) -> _Grid:
    """Return what a stage's grid contributes to the bytes of its passes."""
    return stage.joint_replicas, stage.cp, stage.tp, stage.ep


def _interned(key: Hashable) -> object:
    """Return the same object for equal keys; it is quick to hash."""
    return _KEYS.get_or(key, object)


class Sizes:
    """Bytes of stages over microbatches; equal ones are computed once."""

    def __init__(self, plan: Plan, routing: Routing) -> None:
        self._plan, self._routing = plan, routing
        self._microbatches: dict[tuple[str, int, int], int] = {}
        self._stages: dict[int, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._stage_bytes: dict[tuple[int, int, bool], StageBytes[int]] = {}
        self._split_bytes: dict[tuple[int, int], StageSplitBytes[int]] = {}
        self._tables: dict[tuple[int, int, bool], Ints] = {}
        self._split_tables: dict[tuple[int, int], Ints] = {}
        self._kinds: dict[tuple[str, int], tuple[list[Microbatch], list[int]]] = {}
        self._settings: dict[tuple[int, _Grid], tuple[object, Setting]] = {}
        self._needs: dict[tuple[int, frozenset[str] | None], tuple[object, tuple[Needs, ...]]] = {}
        self._settings_keys: dict[str, object] = {}
        self._state_keys: dict[str, tuple[object, tuple[int, ...]]] = {}

    def _settings_key(self, module: str) -> object:
        """Return a key of the settings that decide the memory of a module's passes, whatever the layers."""
        if module not in self._settings_keys:
            settings, of_module = self._plan.settings, self._plan.settings.of(module)
            own = (
                of_module.computed_again,
                of_module.sequence_parallel,
                of_module.products,
                of_module.key_exchange,
            )
            key = Identity(self._plan.model), settings.precision, settings.kernels, own
            self._settings_keys[module] = _interned(key)
        return self._settings_keys[module]

    def state(self, stage: Stage) -> _State:
        """Return the bytes of a rank's parameters of the stage, if it shares none with other stages."""
        of_module, kinds = self._state_key(stage.module)
        grid = stage.tp, stage.num_shares, stage.ep
        shards = tuple(state_shards(self._plan, stage).values())
        key = of_module, kinds[slice(*stage.layers)], grid, shards
        return _STATES.get_or(key, lambda: self._state(stage))

    def _state_key(self, module: str) -> tuple[object, tuple[int, ...]]:
        """Return a key of what decides the bytes of a weight of the module, and its `layer_numbers`."""
        if module not in self._state_keys:
            settings, of_module = self._plan.settings, self._plan.settings.of(module)
            rule = settings.optimizer, settings.optimizer_precision
            decisive = settings.precision, *rule, settings.kernels
            sharding = of_module.sharding, of_module.instances, num_replicas(self._plan)[module]
            key = Identity(self._plan.model), module, decisive, sharding
            self._state_keys[module] = _interned(key), layer_numbers(self._plan, module)
        return self._state_keys[module]

    def _state(self, stage: Stage) -> _State:
        """Sum over kinds of layers, equal but for the name; over all layers where some have tied weights."""
        layers = self._plan.model.module(stage.module).layers
        shards = state_shards(self._plan, stage)
        first_of: dict[tuple[object, ...], int] = {}
        counts: Counter[int] = Counter()
        for index in range(*stage.layers):
            weights = Weights(stage.module, index)
            parts = shards.get(weights), shards.get(weights._replace(experts=True))
            kind = id(layers[index].operators), layers[index].trainable, parts
            counts[first_of.setdefault(kind, index)] += 1
        sizes: Counter[StateKind] = Counter()
        if len(counts) == 1 == counts.total() or any(layers[index].tied for index in range(*stage.layers)):
            for part, num_bytes in stage_state(self._plan, stage):
                sizes[part] += num_bytes
            return sizes
        for index, count in counts.items():
            for part, num_bytes in self.state(replace(stage, layers=(index, index + 1))).items():
                sizes[part] += count * num_bytes
        return sizes

    def of_microbatches(self, stage: Stage, *, keeps: bool) -> Ints:
        """[microbatches, fields] `of` every microbatch of the stage's replica."""
        key = self._stage_number(stage), stage.replica, keeps
        if key not in self._tables:
            firsts, kinds = self._kinds_in(stage)
            self._tables[key] = np.array([self.of(stage, first, keeps=keeps) for first in firsts])[kinds]
        return self._tables[key]

    def splits_of_microbatches(self, stage: Stage) -> Ints:
        """[microbatches, fields] `split` of every microbatch of the stage's replica."""
        key = self._stage_number(stage), stage.replica
        if key not in self._split_tables:
            firsts, kinds = self._kinds_in(stage)
            self._split_tables[key] = np.array([self.split(stage, first) for first in firsts])[kinds]
        return self._split_tables[key]

    def _kinds_in(self, stage: Stage) -> tuple[list[Microbatch], list[int]]:
        """Return one microbatch of each kind in the stage's replica, and each one's index among these."""
        module_replica = stage.module, stage.replica
        if module_replica not in self._kinds:
            microbatches = self._plan.microbatches_of[module_replica]
            numbers = list(map(self._microbatch_number, microbatches))
            first_of = dict(zip(reversed(numbers), reversed(microbatches), strict=True))
            index_of = {number: index for index, number in enumerate(first_of)}
            self._kinds[module_replica] = list(first_of.values()), [index_of[number] for number in numbers]
        return self._kinds[module_replica]

    def of(self, stage: Stage, microbatch: Microbatch, *, keeps: bool) -> StageBytes[int]:
        """Return the bytes of a stage; `keeps` False: no backward follows, so nothing is kept."""
        key = self._stage_number(stage), self._microbatch_number(microbatch), keeps
        if key not in self._stage_bytes:
            layers, needs = self._layers_with_needs(stage, microbatch, keeps=keeps)
            name, setting = self._keyed_setting(stage, microbatch)
            self._stage_bytes[key] = _SUMS.get_or((layers, name), lambda: self._sum(stage, needs, setting))
        return self._stage_bytes[key]

    def split(self, stage: Stage, microbatch: Microbatch) -> StageSplitBytes[int]:
        """Return the bytes of a stage whose backward of the microbatch is split."""
        key = self._stage_number(stage), self._microbatch_number(microbatch)
        if key not in self._split_bytes:
            layers, needs = self._layers_with_needs(stage, microbatch, keeps=True)
            name, setting = self._keyed_setting(stage, microbatch)
            self._split_bytes[key] = _SPLIT_SUMS.get_or(
                (layers, name), lambda: self._sum_split(stage, needs, setting)
            )
        return self._split_bytes[key]

    def first_moment(self, stage: Stage, microbatch: Microbatch, *, is_split: bool) -> Moment:
        """Return the peak of a stage's first backward, or first W if split; `kept`: more than before it."""
        _, needs = self._layers_with_needs(stage, microbatch, keeps=True)
        _, setting = self._keyed_setting(stage, microbatch)
        if is_split:
            splits = self._of_layers(layer_split_bytes, stage, needs, setting)
            moments = list(weight_moments(splits))
        else:
            moments = list(first_moments(self._in_stage(stage, needs, setting)))
        peak = max(moments, key=float_sum)
        return peak._replace(kept=peak.kept - moments[0].kept)

    def _stage_number(self, stage: Stage) -> int:
        """Return a number, equal for stages whose passes need equal bytes on their ranks."""
        if stage.id not in self._stages:
            shape = stage.module, contents_and_needs(self._routing, stage), _grid_of(stage)
            self._stages[stage.id] = self._numbers.setdefault(shape, len(self._numbers))
        return self._stages[stage.id]

    def _microbatch_number(self, microbatch: Microbatch) -> int:
        """Return a number, equal for microbatches that need equal bytes in equal stages."""
        name = microbatch.module, microbatch.replica, microbatch.index
        if name not in self._microbatches:
            kind = name if self._plan.token_shards else (microbatch.module, row_kinds(self._plan, microbatch))
            key = kind, self._routing.present(microbatch)
            self._microbatches[name] = self._numbers.setdefault(key, len(self._numbers))
        return self._microbatches[name]

    def _layers_with_needs(
        self, stage: Stage, microbatch: Microbatch, *, keeps: bool
    ) -> tuple[object, tuple[Needs, ...]]:
        """Return a key of a stage's layers and gradients, and the gradients."""
        name = self._stage_number(stage), self._routing.present(microbatch) if keeps else None
        if name not in self._needs:
            needs = self._routing.flow(microbatch).needs[stage.module][slice(*stage.layers)]
            if not keeps:
                needs = (Needs(input_grad=False, weight_grad=False),) * len(needs)
            key = self._settings_key(stage.module), stage.module, contents(self._plan, stage), needs
            self._needs[name] = _interned(key), needs
        return self._needs[name]

    def _keyed_setting(self, stage: Stage, microbatch: Microbatch) -> tuple[object, Setting]:
        """Return the key and the setting of a microbatch, derived once per kind and grid."""
        name = self._microbatch_number(microbatch), _grid_of(stage)
        if name not in self._settings:
            setting = self._cached_setting(stage, microbatch)
            self._settings[name] = _interned(setting), setting
        return self._settings[name]

    def _cached_setting(self, stage: Stage, microbatch: Microbatch) -> Setting:
        if self._plan.token_shards:
            return setting_of(self._plan, stage, microbatch)
        rows, grid = row_kinds(self._plan, microbatch), _grid_of(stage)
        settings = self._settings_key(stage.module)
        key = settings, Identity(self._plan.batch), stage.module, rows, grid
        return _SETTINGS.get_or(key, lambda: setting_of(self._plan, stage, microbatch))

    def _sum(self, stage: Stage, needs: tuple[Needs, ...], setting: Setting) -> StageBytes[int]:
        plan = self._plan
        module = plan.model.module(stage.module)
        layers = self._in_stage(stage, needs, setting)
        is_loss = module.has_loss and stage.layers[1] == len(module.layers)
        frees_outputs = plan.settings.kernels.is_megatron  # outputs are freed once sent
        last = module.layers[stage.layers[1] - 1]
        output = 0 if is_loss or frees_outputs else self._emitted(last, setting)
        shared = max(layer.own.shared for layer in layers)  # recomputed layers hold it too, to run again
        if plan.settings.kernels is Kernels.EAGER:
            shared += stage_choice_bytes(module.layers[slice(*stage.layers)], setting)
        return stage_bytes(layers, shared, output)

    def _in_stage(self, stage: Stage, needs: Sequence[Needs], setting: Setting) -> list[LayerInStage]:
        layers = self._plan.model.module(stage.module).layers[slice(*stage.layers)]
        own = self._of_layers(layer_bytes, stage, needs, setting)
        checkpoints = self._checkpoints(stage, needs, setting)
        weights_of = {
            id(layer.operators): sum(
                round(held_elements(p, stage) * setting.element_bytes) for p in trainable_parameters(layer)
            )
            for layer in {id(layer.operators): layer for layer in layers}.values()
        }
        gradients = [
            weights_of[id(layer.operators)] if need.weight_grad else 0
            for layer, need in zip(layers, needs, strict=True)
        ]
        unkept = self._unkept(stage, checkpoints, setting)
        waiting = self._waiting(stage, needs, setting)
        columns = own, checkpoints, unkept, gradients, waiting
        return [LayerInStage(*row) for row in zip(*columns, strict=True)]

    def _unkept(self, stage: Stage, checkpoints: Sequence[int | None], setting: Setting) -> list[int]:
        """[layers] working bytes of a forward that keeps nothing, where a layer is recomputed; else 0.

        In fused kernels it has as many as one that keeps its tensors, besides its input.
        """
        if all(checkpoint is None for checkpoint in checkpoints):
            return [0] * len(checkpoints)
        no_needs = (Needs(input_grad=False, weight_grad=False),) * len(checkpoints)
        alone = self._of_layers(layer_bytes, stage, no_needs, setting)
        has_input = self._plan.settings.kernels is Kernels.EAGER
        return [
            0 if checkpoint is None else layer.forward + (0 if has_input else checkpoint)
            for layer, checkpoint in zip(alone, checkpoints, strict=True)
        ]

    def _waiting(self, stage: Stage, needs: Sequence[Needs], setting: Setting) -> list[int]:
        """[layers] bytes of tied weights' gradients that autograd holds until an earlier layer has its own.

        Megatron's products add theirs to the accumulated ones themselves.
        """
        layers = self._plan.model.module(stage.module).layers[slice(*stage.layers)]
        if self._plan.settings.kernels.is_megatron:
            return [0] * len(layers)
        earlier: set[str] = set()
        waiting = []
        for layer, need in zip(layers, needs, strict=True):
            names = {shared for _, shared in layer.tied} if need.weight_grad else set()
            tied = (p for p in trainable_parameters(layer) if p.name in names & earlier)
            waiting.append(sum(round(held_elements(p, stage) * setting.element_bytes) for p in tied))
            earlier |= names
        return waiting

    def _sum_split(self, stage: Stage, needs: tuple[Needs, ...], setting: Setting) -> StageSplitBytes[int]:
        splits = self._of_layers(layer_split_bytes, stage, needs, setting)
        return stage_split_bytes(self._in_stage(stage, needs, setting), splits)

    def _of_layers(
        self,
        account: Callable[[Layer, Needs, Setting, Kernels], Account],
        stage: Stage,
        needs: Sequence[Needs],
        setting: Setting,
    ) -> list[Account]:
        """Return the accounts of a stage's layers; equal ones are computed once."""
        layers, kernels = self._plan.model.module(stage.module).layers, self._plan.settings.kernels
        divided = token_borders(self._plan, stage).divided
        account_of: dict[tuple[object, ...], Account] = {}
        accounts = []
        for index, need in zip(range(*stage.layers), needs, strict=True):
            layer, divides_tokens = layers[index], index in divided
            shape = id(layer.operators), layer.kind, layer.out_width, layer.emits, layer.trainable, layer.tied
            key = shape, need, divides_tokens
            if key not in account_of:
                own = setting._replace(divides_tokens=divides_tokens)
                account_of[key] = account(layer, need, own, kernels)
            accounts.append(account_of[key])
        return accounts

    def _checkpoints(self, stage: Stage, needs: Sequence[Needs], setting: Setting) -> list[int | None]:
        """[layers] bytes of a recomputed layer's input, 0 where it has no backward; None: not recomputed."""
        recomputed = zip(range(*stage.layers), recomputed_in(self._plan, stage), needs, strict=True)
        return [
            (self._entering(stage, index, setting) if need.any else 0) if is_again else None
            for index, is_again, need in recomputed
        ]

    def _emitted(self, layer: Layer, setting: Setting) -> int:
        tokens = setting.work.tokens(layer.emits) / setting.grid.cp
        return round(tokens * layer.out_width * setting.element_bytes)

    def _entering(self, stage: Stage, index: int, setting: Setting) -> int:
        """Return the bytes of a layer's input; those of a module's first layer are not counted."""
        layers = self._plan.model.module(stage.module).layers
        borders = token_borders(self._plan, stage)
        is_divided = index in borders.divided and index not in borders.divides
        num_bytes = 0 if index == 0 else self._emitted(layers[index - 1], setting)
        return ceil(num_bytes / stage.tp) if is_divided else num_bytes
