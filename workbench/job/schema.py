"""What a job.yaml may say, and how strictly."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from workbench.masks.patterns import CAUSAL, PATTERNS, canonical
from workbench.plan.plan import KeyExchange, Precision
from workbench.schedule.choice import ScheduleKind

Count = Annotated[int, Field(ge=1, le=10_000_000, strict=True)]
Items = Annotated[int, Field(ge=0, le=10_000, strict=True)]  # of one modality in one sample
Positive = Annotated[float, Field(gt=0, le=1e15)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[Positive, Field(le=86_400)]  # of a clip or a video
Mask = Annotated[
    str, WithJsonSchema({"type": "string", "pattern": rf"^({'|'.join(PATTERNS)})(\(.*\))?$"})
]  # editors know the names


def _mask(said: object) -> str:
    if not isinstance(said, str):
        raise ValueError("want a name or a call, as sliding_window(window=4096)")
    return canonical(said)


class Strict(BaseModel):
    """Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ProjectorStepSpec(Strict):
    """One step of a projector: exactly one of `norm`, `merge`, `linear` and `act`.

    Args:
        norm: over the token's width.
        eps: of the norm.
        offset: added to the norm's weights: 1 in Gemma's.
        merge: neighbouring tokens that become one: a square of an image's patches, a run of a clip's.
        how: they become one: side by side token after token (`concat`) or channel after channel
            (`interleave`), or their mean.
        linear: width that a matmul gives; `out`: the consumer's.
        bias: whether the matmul has one.
        act: an activation; `swiglu` halves the width.
    """

    norm: Literal["layer", "rms"] | None = None
    eps: Positive = 1e-5
    offset: Annotated[float, Field(ge=0, le=1)] = 0.0
    merge: Count | None = None
    how: Literal["concat", "interleave", "mean"] = "concat"
    linear: Count | Literal["out"] | None = None
    bias: Annotated[bool, Field(strict=True)] = True
    act: Literal["gelu", "gelu_pytorch_tanh", "silu", "relu", "swiglu"] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(value is not None for value in (self.norm, self.merge, self.linear, self.act)) != 1:
            raise ValueError("want exactly one of 'norm', 'merge', 'linear' and 'act'")
        return self


class ModuleSpec(Strict):
    """One module: exactly one of `zoo` and `config` says which.

    Args:
        zoo: a known model by its name.
        config: path of a Hugging Face config.json, or its keys in place.
        modality: of the samples' segments that are its items; left out: the model's. The LLM's is `text`.
        trainable: what is trained: all weights, those of the projector alone, or none.
        projector: what joins an encoder to the width of its consumer: a name, or its steps.
        feature_layer: hidden state of an encoder that its projector reads, without the final norm: -1 the
            last block's, -2 the one before; left out: the encoder's output.
    """

    zoo: str | None = None
    config: str | dict[str, Any] | None = None
    modality: str | None = None
    trainable: Literal["all", "projector", "none"] = "all"
    projector: Literal["linear", "mlp", "merger"] | tuple[ProjectorStepSpec, ...] | None = None
    feature_layer: Annotated[int, Field(strict=True, ge=-10_000, le=10_000)] | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.zoo is None) == (self.config is None):
            raise ValueError("want exactly one of 'zoo' and 'config'")
        if self.config is None and (self.feature_layer is not None or isinstance(self.projector, tuple)):
            raise ValueError("'feature_layer' and a projector's steps belong to 'config'")
        return self


class ModelSpec(Strict):
    """Modules and how they are joined.

    Args:
        modules: by name, in order; exactly one of them is the LLM.
        edges: pairs of a module and the module that reads its output; left out: every encoder feeds the LLM.
    """

    modules: Annotated[dict[str, ModuleSpec], Field(min_length=1)]
    edges: tuple[tuple[str, str], ...] | None = None


class LinkSpec(Strict):
    """A link.

    Args:
        gb_per_s: bandwidth in 10^9 bytes per second of one rank's port or one network card, in one direction.
        latency_us: microseconds that a message travels after it left.
        cards: of `inter`, network cards of a node; left out: one.
    """

    gb_per_s: Positive
    latency_us: Annotated[float, Field(ge=0, le=1e15)]
    cards: Count | None = None


class LocalSpec(Strict):
    """Processes of this machine.

    Args:
        ranks: processes.
        cores: that they share.
    """

    ranks: Count
    cores: Count


class PoolSpec(Strict):
    """Nodes of one kind of device, that of the profile.

    Args:
        profile: name of a shipped profile or path of one; says which device it is.
        nodes: how many.
        ranks_per_node: devices of a node.
        memory_gib: of a device; left out: the profile's.
        intra: link between ranks of a node; left out: the profile's.
        inter: the node's card; left out: the cluster's `inter`, or the profile's.
        dollars_per_hour: price of one rank.
        modules: that may use these nodes; left out: all.
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
    """`local`, `pools`, or a device with `nodes` and `ranks_per_node`. The rest defaults to the profile's.

    Args:
        local: processes of this machine instead of nodes.
        pools: several kinds of devices, by name.
        device: kind of the ranks.
        nodes: how many.
        ranks_per_node: devices of a node.
        memory_gib: of a device; of all local processes together.
        intra: link between ranks of a node.
        inter: a network card between nodes, and how many of them a node has.
        dollars_per_gpu_hour: price of one rank; pools have their own.
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


class ItemSpec(Strict):
    """Items of one modality in a sample; sizes default to the encoder's native input.

    `images` and `videos`, `seconds`, or `tokens` say the size.

    Args:
        each: items of a fixed sample.
        most: the most items of a mixture's sample, which has 1 to that many.
        missing: share of a mixture's samples that have none.
        images: (height, width) in pixels, for encoders of any size and those that put tiles together.
        videos: (height, width, seconds), for encoders whose model says which frames it looks at.
        seconds: of audio; a clip longer than the encoder's window becomes several items.
        tokens: (into the encoder's blocks, into the LLM's sequence) of an item.
    """

    each: Items = 1
    most: Annotated[Items, Field(ge=1)] | None = None
    missing: Share = 0.0
    images: Annotated[tuple[tuple[Count, Count], ...], Field(min_length=1)] | None = None
    videos: Annotated[tuple[tuple[Count, Count, Seconds], ...], Field(min_length=1)] | None = None
    seconds: Seconds | None = None
    tokens: tuple[Count, Count] | None = None

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if sum(value is not None for value in (self.images or self.videos, self.seconds, self.tokens)) > 1:
            raise ValueError("want at most one of 'images' with 'videos', 'seconds' and 'tokens'")
        return self


class FixedSpec(Strict):
    """Equal samples.

    Args:
        text_tokens: of each.
        items: by modality.
    """

    text_tokens: Count
    items: dict[str, ItemSpec] = {}

    @model_validator(mode="after")
    def _no_chance(self) -> Self:
        if any(item.most is not None or item.missing for item in self.items.values()):
            raise ValueError("'most' and 'missing' belong to a 'mixture'")
        return self


class MixtureSpec(Strict):
    """Samples that differ, drawn from a seed.

    Args:
        seed: of the draw.
        text_tokens: least and most of a sample.
        items: by modality.
    """

    seed: Annotated[int, Field(ge=0, strict=True)]
    text_tokens: tuple[Count, Count]
    items: dict[str, ItemSpec] = {}

    @model_validator(mode="after")
    def _no_fixed_number(self) -> Self:
        if any(item.each != 1 or item.seconds is not None for item in self.items.values()):
            raise ValueError("'each' and 'seconds' belong to 'fixed'; a mixture has 'most' and 'missing'")
        return self


class BatchSpec(Strict):
    """The global batch: exactly one of `fixed`, `mixture` and `sizes` says its samples.

    Args:
        samples: of one optimizer step.
        microbatch_samples: that the LLM processes together.
        replicas: data-parallel copies of every module whose layout has no `dp`.
        mask: who sees whom in the LLM: a name, or a call as `sliding_window(window=4096)`. A list goes round
            the samples: the first mask is the first sample's.
        fixed: equal samples.
        mixture: samples that differ.
        sizes: file with the sizes of samples, or a corpus by name; as `--sizes` takes them.
    """

    samples: Annotated[Count, Field(le=100_000)]
    microbatch_samples: Count = 1
    replicas: Count = 1
    mask: Mask | Annotated[tuple[Mask, ...], Field(min_length=1)] = CAUSAL
    fixed: FixedSpec | None = None
    mixture: MixtureSpec | None = None
    sizes: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(value is not None for value in (self.fixed, self.mixture, self.sizes)) != 1:
            raise ValueError("want exactly one of 'fixed', 'mixture' and 'sizes'")
        return self

    @field_validator("mask", mode="before")
    @classmethod
    def _known_masks(cls, said: object) -> object:
        if not isinstance(said, list | tuple):
            return _mask(said)
        return tuple(_mask(each) for each in said)


class LayoutSpec(Strict):
    """Ranks of a module: dp replicas of pp stages of tp x cp ranks.

    Args:
        pp: pipeline stages, without virtual ones; left out: searched.
        tp: tensor parallelism.
        cp: context parallelism.
        ep: expert parallelism: how many of the tp x cp ranks hold a layer's experts among them; 1: each
            expert is cut by tp.
        dp: data parallelism; left out: the batch's replicas.
        rank_offset: first rank; left out: behind the modules in front.
        stage_layers: layers of every stage; left out: balanced.
        recompute: activations that the backward computes again.
        key_exchange: how context-parallel ranks bring queries and keys together.
        sequence_parallel: whether tensor-parallel ranks split the tokens between attentions and MLPs.
        sharding: what data-parallel ranks keep only a part of.
        instances: copies of the sharded state; more than one is hybrid sharding.
    """

    pp: Count | None = None
    tp: Count = 1
    cp: Count = 1
    ep: Count = 1
    dp: Count | None = None
    rank_offset: Annotated[int, Field(ge=0, le=10_000_000, strict=True)] | None = None
    stage_layers: tuple[Count, ...] = ()
    recompute: Literal["none", "full"] = "none"
    key_exchange: KeyExchange = KeyExchange.ALL_GATHER
    sequence_parallel: Annotated[bool, Field(strict=True)] = False
    sharding: Literal["none", "optimizer", "parameters"] = "none"
    instances: Count = 1


class ScheduleChoiceSpec(Strict):
    """The order of passes.

    Args:
        kind: which schedule.
        virtual_stages: stages of the LLM on each of its ranks; left out: the kind's usual number.
        memory_limit: most microbatches that a rank of the LLM may hold, of `zb-` kinds; left out: their own.
        window: of schedules in phases: microbatches of the LLM between two changes of module; left out: all.
        run_ahead: windows by which encoder forwards come early; under `1f1b` microbatches of frozen encoders.
        offload: of schedules in phases without a window: encoder state is on the host while the LLM runs.
    """

    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    virtual_stages: Count | None = None
    memory_limit: Count | None = None
    window: Count | None = None
    run_ahead: Annotated[int, Field(ge=0, le=10_000_000, strict=True)] | None = None
    offload: Annotated[bool, Field(strict=True)] | None = None


class JobSpec(Strict):
    """A whole job.yaml.

    Args:
        name: of the job.
        model: the modules.
        cluster: the ranks there are.
        batch: the samples of a step.
        layouts: by module; one that is left out has pp searched and all other degrees 1.
        schedule: the order of passes.
        max_ranks: how many ranks of the cluster may be used; left out: all.
        precision: of weights, activations and messages.
        optimizer_precision: of gradients while they are added up and of what the optimizer updates.
        kernels: decides what layers keep for their backward; auto: eager on processes of this machine, fused
            on GPUs.
        profile: of the machine: a shipped name, or the path of a file that `workbench calibrate` wrote.
    """

    name: Annotated[str, Field(min_length=1)]
    model: ModelSpec
    cluster: ClusterSpec
    batch: BatchSpec
    layouts: dict[str, LayoutSpec] = {}
    schedule: ScheduleChoiceSpec = ScheduleChoiceSpec()
    max_ranks: Count | None = None
    precision: Literal["float64", "float32", "bfloat16"] = "bfloat16"
    optimizer_precision: Precision | None = None
    kernels: Literal["auto", "fused", "eager"] = "auto"
    profile: Annotated[str, Field(min_length=1)]
