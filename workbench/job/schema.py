"""What a job.yaml may say, and how strictly."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from workbench.cost.products import ProductFormat
from workbench.job.batch_schema import BatchSpec
from workbench.job.strict import Count, Positive, Strict
from workbench.model.block_modules import BlockModule
from workbench.model.layer import LARGEST_SIZE
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import KeyExchange, Precision
from workbench.schedule.choice import ScheduleKind
from workbench.schedule.sharded import ReshardAfter


class ProjectorStepSpec(Strict):
    """One step of a projector. Set exactly one of `norm`, `merge`, `linear`, `act` and `softmax`.

    Args:
        norm: normalization over the token width; `unscaled`: RMS without weights.
        eps: epsilon of the norm.
        offset: added to the weights of the norm; 1 for Gemma.
        merge: number of neighbouring tokens that become one: a square of image patches, or consecutive audio
            tokens.
        how: merged tokens are concatenated token by token (`concat`) or channel by channel (`interleave`), or
            averaged (`mean`).
        linear: output width of a linear layer; `out`: the width of the module that reads the projector.
        bias: whether the linear layer has a bias.
        act: activation function; `swiglu` halves the width.
        softmax: width after a softmax; zeros fill it up.
    """

    norm: Literal["layer", "rms", "unscaled"] | None = None
    eps: Positive = 1e-5
    offset: Annotated[float, Field(ge=0, le=1)] = 0.0
    merge: Count | None = None
    how: Literal["concat", "interleave", "mean"] = "concat"
    linear: Count | Literal["out"] | None = None
    bias: Annotated[bool, Field(strict=True)] = True
    act: Literal["gelu", "gelu_pytorch_tanh", "silu", "relu", "relu2", "swiglu"] | None = None
    softmax: Count | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = (self.norm, self.merge, self.linear, self.act, self.softmax)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("want exactly one of 'norm', 'merge', 'linear', 'act' and 'softmax'")
        return self


class LoraSpec(Strict):
    """LoRA: adapters of products y = x W^T of every block, which add (alpha / rank) (x A^T) B^T.

    Args:
        rank: of every adapter: A is [rank, in], B is [out, rank]. 0: there are none.
        alpha: scale of what adapters add, times the rank.
        modules: products that have adapters: all, those of the attention or of the mlp, or the attention's
            without its output (qkv).
    """

    rank: Annotated[int, Field(strict=True, ge=0, le=LARGEST_SIZE)] = 16
    alpha: Positive = 32.0
    modules: Literal["all", "attention", "qkv", "mlp"] = "all"


StateIndex = Annotated[int, Field(strict=True, ge=-10_000, le=10_000)]


class ModuleSpec(Strict):
    """One module: an encoder, the LLM or a generator. Set exactly one of `zoo` and `config`.

    Args:
        zoo: name of a known model.
        config: path of a Hugging Face config.json, or its keys inline.
        modality: modality of the sample segments that the module processes; default: the model's. The LLM's
            is `text`.
        trainable: weights that are trained: all, only the projector's with the encoder's final norm, or none.
        projector: maps the encoder's output to the width of the module that reads it: a name, or a list of
            steps.
        lora: adapters that are trained beside the module's frozen products; `trainable` is then `projector`
            or `none`.
        feature_layer: hidden state of the encoder that the projector reads, without the final norm: -1 after
            the last block, -2 after the one before; several are read side by side; default: the encoder's
            output.
        expert_load_cv: coefficient of variation of the shares of rows that a layer's experts get in the long
            run; 0: choices vary at random alone.
    """

    zoo: str | None = None
    config: str | dict[str, Any] | None = None
    modality: str | None = None
    trainable: Literal["all", "projector", "none"] = "all"
    projector: Literal["linear", "mlp", "merger"] | tuple[ProjectorStepSpec, ...] | None = None
    lora: LoraSpec | None = None
    feature_layer: StateIndex | tuple[StateIndex, ...] | None = None
    expert_load_cv: Annotated[float, Field(ge=0, le=1000)] = 0.0

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.zoo is None) == (self.config is None):
            raise ValueError("want exactly one of 'zoo' and 'config'")
        if self.config is None and (self.feature_layer is not None or isinstance(self.projector, tuple)):
            raise ValueError("'feature_layer' and a projector's steps belong to 'config'")
        return self


class ModelSpec(Strict):
    """The modules of the model and their connections.

    Args:
        modules: modules by name, in order; exactly one is the LLM.
        edges: pairs of a module and the module that reads its output; default: every encoder feeds the LLM.
    """

    modules: Annotated[dict[str, ModuleSpec], Field(min_length=1)]
    edges: tuple[tuple[str, str], ...] | None = None


class LinkSpec(Strict):
    """A link inside a node or between nodes.

    Args:
        gb_per_s: bandwidth in 10^9 bytes per second of one rank's port or one network card, in one direction.
        latency_us: latency in microseconds, from the end of sending to arrival.
        cards: only for `inter`: network cards per node; default: one.
    """

    gb_per_s: Positive
    latency_us: Annotated[float, Field(ge=0, le=1e15)]
    cards: Count | None = None


class LocalSpec(Strict):
    """Processes on this machine.

    Args:
        ranks: number of processes.
        cores: CPU cores that they share.
    """

    ranks: Count
    cores: Count


class PoolSpec(Strict):
    """A device pool: nodes with one kind of device, which the profile names.

    Args:
        profile: name or path of the device's profile, the same in all of the job.
        nodes: number of nodes.
        ranks_per_node: devices per node.
        memory_gib: memory per device; default: the profile's.
        intra: link between ranks of a node; default: the profile's.
        inter: network card of a node; default: the cluster's `inter`, or the profile's.
        dollars_per_hour: price of one rank per hour.
        modules: modules that may use these nodes; default: all.
    """

    profile: Annotated[str, Field(min_length=1)]
    nodes: Count
    ranks_per_node: Count
    memory_gib: Positive | None = None
    intra: LinkSpec | None = None
    inter: LinkSpec | None = None
    dollars_per_hour: Positive | None = None
    modules: tuple[str, ...] = ()


class ClusterSpec(Strict):
    """The cluster. Set `local`, or `pools`, or `device` with `nodes` and `ranks_per_node`.

    Other keys default to the profile's values.

    Args:
        local: processes on this machine instead of nodes.
        pools: device pools by name, for clusters with several kinds of devices.
        device: device of every rank.
        nodes: number of nodes.
        ranks_per_node: devices per node.
        memory_gib: memory per device; with `local`, of all processes together.
        intra: link between ranks of a node.
        inter: one network card between nodes, and the number of cards per node.
        dollars_per_gpu_hour: price of one rank per hour; pools have their own prices.
    """

    local: LocalSpec | None = None
    pools: Annotated[dict[str, PoolSpec], Field(min_length=1)] | None = None
    device: str | None = None
    nodes: Count | None = None
    ranks_per_node: Count | None = None
    memory_gib: Positive | None = None
    intra: LinkSpec | None = None
    inter: LinkSpec | None = None
    dollars_per_gpu_hour: Positive | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        remote = (self.device, self.nodes, self.ranks_per_node)
        if self.pools is not None:
            beside = (*remote, self.local, self.memory_gib, self.intra, self.dollars_per_gpu_hour)
            if any(value is not None for value in beside):
                raise ValueError("'pools' excludes everything beside it but 'inter'")
            return self
        if self.local is not None and any(value is not None for value in remote):
            raise ValueError("'local' excludes 'device', 'nodes' and 'ranks_per_node'")
        if self.local is None and any(value is None for value in remote):
            raise ValueError("want 'local', or all of 'device', 'nodes' and 'ranks_per_node', or 'pools'")
        return self


class LayoutSpec(Strict):
    """Parallelism of a module: dp replicas with pp stages of tp x cp ranks each.

    An entry that states settings alone, of the keys from `recompute` on, leaves degrees open to strategies
    that search them, as no entry does; one with any other key fixes tp, cp and ep.

    Args:
        pp: pipeline-parallel stages, without virtual stages; default: the strategy searches it.
        tp: tensor-parallel ranks.
        cp: context-parallel ranks.
        ep: expert-parallel ranks, over which the experts of a layer are distributed: a divisor of tp x cp, or
            tp x cp times a divisor of the replicas; 1: every expert is sharded by tp.
        dp: data-parallel replicas; default: `replicas` of the batch.
        rank_offset: first rank of the module; default: after the modules before it.
        stage_layers: layers of each stage; default: balanced.
        recompute: what the backward recomputes: `none`, `blocks` as most trainers do, or `full`: every layer;
            strategies that search layouts take `none` for open.
        recompute_layers: number of recomputed layers, or of blocks with `recompute: blocks`, spread evenly
            over the module; default: all.
        recompute_modules: parts of every block to recompute in place of `recompute`; simulated, not run.
        key_exchange: how context-parallel ranks exchange keys and values, or heads.
        sequence_parallel: whether tensor-parallel ranks split the tokens outside attention and MLPs.
        sharding: state that is sharded over data- and context-parallel ranks; that of distributed experts
            over those of them that hold the same ones.
        instances: copies of the sharded state; more than one is hybrid sharding (HSDP).
        reshard_after: only with `sharding: parameters`: `pass` gathers them for every forward and backward,
            `backward` keeps those of a forward for its backward, `step` gathers and reduce-scatters once,
            gathers from the beginning of the step, one layer after another, and lets no pass wait for a
            reduce-scatter.
        products: operand format of the linear layers of blocks, without routers; simulated, not run.
            `same`: the precision. `fp8`: one scale a tensor, from the tensor itself; `fp8_delayed`: from
            earlier steps; `fp8_row`: one a row; `fp8_block`: one for 128 elements; `mxfp8`: one for 32;
            `nvfp4`: one for 16.
    """

    pp: Count | None = None
    tp: Count = 1
    cp: Count = 1
    ep: Count = 1
    dp: Count | None = None
    rank_offset: Annotated[int, Field(ge=0, le=10_000_000, strict=True)] | None = None
    stage_layers: tuple[Count, ...] = ()
    recompute: Literal["none", "blocks", "full"] = "none"
    recompute_layers: Count | None = None
    recompute_modules: tuple[BlockModule, ...] = ()
    key_exchange: KeyExchange = KeyExchange.ALL_GATHER
    sequence_parallel: Annotated[bool, Field(strict=True)] = False
    sharding: Literal["none", "optimizer", "parameters"] = "none"
    instances: Count = 1
    reshard_after: ReshardAfter = ReshardAfter.PASS
    products: ProductFormat = ProductFormat.SAME


class ScheduleChoiceSpec(Strict):
    """The pipeline schedule: the order of passes on each rank.

    Args:
        kind: name of the schedule.
        virtual_stages: LLM stages per rank; default: the usual number of the schedule.
        memory_limit: only `zb-...`: microbatches that an LLM rank may hold at most; default: the schedule's.
        window: only `three-phase`: LLM microbatches between two switches of modules; default: all.
        run_ahead: how early encoder forwards run: in windows, or with `1f1b` in microbatches of frozen
            encoders.
        offload: only `three-phase` without a window: keep encoder state on the host while the LLM runs.
    """

    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    virtual_stages: Count | None = None
    memory_limit: Count | None = None
    window: Count | None = None
    run_ahead: Annotated[int, Field(ge=0, le=10_000_000, strict=True)] | None = None
    offload: Annotated[bool, Field(strict=True)] | None = None


class JobSpec(Strict):
    """The top level of a job file.

    Args:
        name: name of the job.
        model: the modules and their connections.
        cluster: the ranks and links.
        batch: the samples of one step.
        layouts: parallelism by module; a module without an entry has pp searched and all other degrees 1, or
            those that the strategy searches.
        schedule: the pipeline schedule.
        max_ranks: number of ranks of the cluster that may be used; default: all.
        precision: precision of weights, activations and messages.
        optimizer_precision: precision of gradient accumulation and of the weights and moments that the
            optimizer updates.
        optimizer: rule of the update. `muon`: of matrices of blocks, and AdamW for all other weights.
        kernels: kernels of the layers, which determine the activations kept for the backward; auto: eager on
            this machine's processes, fused on GPUs.
        profile: profile of the machine: a shipped name, or the path of a file from `workbench calibrate`.
    """

    name: Annotated[str, Field(min_length=1)]
    model: ModelSpec
    cluster: ClusterSpec
    batch: BatchSpec
    layouts: dict[str, LayoutSpec] = Field(default={})
    schedule: ScheduleChoiceSpec = ScheduleChoiceSpec()
    max_ranks: Count | None = None
    precision: Literal["float64", "float32", "bfloat16"] = "bfloat16"
    optimizer_precision: Precision | None = None
    optimizer: Optimizer = Optimizer.ADAMW
    kernels: Literal["auto", "fused", "eager"] = "auto"
    profile: Annotated[str, Field(min_length=1)]

    @field_validator("precision", mode="before")
    @classmethod
    def _no_format_of_products(cls, value: object) -> object:
        if value != ProductFormat.SAME and value in list(ProductFormat):
            raise ValueError(
                f"input should be 'float64', 'float32' or 'bfloat16', got {value!r}; want products: {value} "
                "in the layout of a module"
            )
        return value
