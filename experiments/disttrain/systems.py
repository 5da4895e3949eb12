"""DistTrain, Megatron-LM and DistMM* on one task: GPUs, iteration, model FLOP utilisation, throughput.

Source: Z. Zhang et al., "DistTrain", sections 2.1, 4.1 to 4.3, 6 and 7, appendix A.1.
DistTrain and DistMM*, which has all its techniques but the orchestration (section 7), cut activations by
sequence and overlap the collectives of tensor parallelism with products (StepCCL), in four pieces as in
`experiments.disttrain.figure22`; Megatron-LM cuts activations by sequence, and its products wait.
All three are evaluated by the same formula: the first microbatch through all stages, then the slowest stage
for each other, which is exact for 1F1B over equal microbatches, then every module's gradients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil

from experiments.harness.printed import printed_rows
from experiments.harness.printed_pipeline import StageTimes
from workbench.balance.orchestration.allocation import proportional_allocation
from workbench.balance.orchestration.exact import evaluate, options_of, orchestrate
from workbench.balance.orchestration.task import Degrees, Orchestration, Task, Unit
from workbench.cost.execution import ActivationCut, Execution, SavedInput
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, load_profile
from workbench.cost.roofline import RowWork, Work, layer_flop
from workbench.float_sum import float_sum
from workbench.model.diffusion import STABLE_DIFFUSION_2_1, behind_projector, unet_layers
from workbench.model.frozen import Needs
from workbench.model.model_graph import GENERATED, ModelGraph, Module, connect
from workbench.model.zoo import from_shape
from workbench.plan.plan import Precision

PROFILE = "A100-80GB"
GPU_BYTES = 80e9
NODE_GPUS = 8
NVLINK = Link(name="NVLink, 300 GB/s both ways", bytes_per_s=150e9, latency_s=3e-6)
FABRIC_BYTES_PER_S = 4 * 200e9 / 8 / NODE_GPUS  # of one GPU: four links of 200 Gbit/s a node
TOKENS = 8192
PATCH = 16
LATENT = 8  # pixels of a side to one of the latent
TP_SIZES = (1, 2, 4, 8)
LLM_SHAPES = {"MLLM-9B": "llama-2-7b", "MLLM-15B": "llama-2-13b", "MLLM-72B": "llama-3.1-70b"}
MODELS = tuple(LLM_SHAPES)
ACTIVATION_BYTES = 34.0  # per token and channel of a layer (Korthikanti et al. 2022, without attention)
MICROBATCH = 1
SEQUENCE = Execution(activations=ActivationCut.SEQUENCE, saved_input=SavedInput.WHOLE)
STEPCCL = replace(SEQUENCE, overlap_pieces=4)
LAION_PX = (
    352  # of a side: 16 such images and 448 tokens of text are a sample, as in `laion-interleaved-like`
)

EVERYTHING = Needs(input_grad=True, weight_grad=True)
THROUGH = Needs(input_grad=True, weight_grad=False)
NOTHING = Needs(input_grad=False, weight_grad=False)


def machine() -> Profile:
    """The profile without its measured collectives: over the paper's links they follow the ring formulas."""
    return replace(load_profile(PROFILE), collectives=())


class Trained(Enum):
    """The settings of section 7.3, by the backwards of encoder, LLM and generator."""

    ALL = (EVERYTHING, EVERYTHING, EVERYTHING)
    PROJECTORS = (NOTHING, THROUGH, THROUGH)
    ENCODER = (EVERYTHING, THROUGH, THROUGH)
    LLM = (NOTHING, EVERYTHING, THROUGH)
    GENERATOR = (NOTHING, NOTHING, EVERYTHING)


class Calls(Enum):
    """Whether encoder and generator take the images of a sample in one call, or in separate calls.

    Frameworks batch images of one size; images of many sizes run one by one unless they are packed.
    """

    TOGETHER = "in one call"
    EACH = "one call each"


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images of a sample of 8,192 tokens, which the paper does not state.

    Args:
        read: images that the encoder reads.
        drawn: images that the generator is trained on.
        read_px: side of images that are read; None: as those that are drawn.
        calls: how calls batch the images.
    """

    read: int
    drawn: int
    read_px: int | None = None
    calls: Calls = Calls.TOGETHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model on one kind of sample.

    Args:
        model: a name in `MODELS`.
        images: images in a sample.
        trained: which modules are trained.
        side_px: side of images; None: as section 7 states for those that are drawn.
    """

    model: str
    images: Images
    trained: Trained = Trained.ALL
    side_px: int | None = None

    @property
    def pixels(self) -> int:
        """Side of the drawn images, the only one that section 7 states."""
        if self.side_px is not None:
            return self.side_px
        (row,) = (row for row in printed_rows("disttrain_prose_models") if row["mllm"] == self.model)
        return int(row["gen_image_px"])


def plausible_images(model: str) -> dict[str, Images]:
    """Images that fit into 8,192 tokens at 16 x 16 pixels a token, by name; the first is nominal.

    Images are read either at the drawn size, filling a part of the sample, or at their size in the data,
    where more fit; in one call or in separate ones.
    """
    most = TOKENS // (Workload(model=model, images=Images(read=1, drawn=1)).pixels // PATCH) ** 2
    parts = {"half": most / 2, "a quarter": most / 4, "three quarters": most * 3 / 4, "all": most}
    images_of = {
        f"{part} of the sample is images, {name} drawn": Images(
            read=round(read), drawn=round(read) if name == "all" else 1
        )
        for part, read in parts.items()
        if read == round(read)
        for name in ("all", "one")
    }
    images_of |= {
        f"16 images of {LAION_PX} px, {name} drawn": Images(read=16, drawn=drawn, read_px=LAION_PX)
        for name, drawn in (("all", 16), ("one", 1))
    }
    return {
        name if calls is Calls.TOGETHER else f"{name}, {calls.value}": replace(images, calls=calls)
        for calls in Calls
        for name, images in images_of.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One system's result on a workload."""

    num_gpus: int
    iteration_s: float
    mfu: float
    samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A module with its work for one sample."""

    name: str
    module: Module
    items: int  # that can be worked on apart: images, or one text
    item: Work
    needs: Needs
    calls: Calls

    def sample_s(self, cost: CostModel, tp: int) -> float:
        """Seconds of forward and backward of one sample."""
        return self.passes_s(cost, tp, self.items).total_s

    def passes_s(self, cost: CostModel, tp: int, items: int) -> StageTimes:
        """Seconds of the passes over some items of a sample."""
        link = None if tp == 1 else NVLINK
        num_calls = 1 if self.calls is Calls.TOGETHER else items
        work = Work(self.item.rows * (items // num_calls))
        times = [
            cost.layer_time(layer, work, tp=tp, cp=1, precision=Precision.BFLOAT16, link=link)
            for layer in self.module.layers
        ]
        return StageTimes(
            num_calls * float_sum(time.forward_s for time in times),
            num_calls * float_sum(time.backward_s(self.needs) for time in times),
        )

    @property
    def sample_flop(self) -> float:
        """FLOP that the step needs, without recompute; attention by its query-key pairs."""
        passes = 1 + self.needs.input_grad + self.needs.weight_grad
        return passes * self.items * sum(layer_flop(layer, self.item) for layer in self.module.layers)

    @property
    def reduction_bytes(self) -> float:
        """Bytes of the reduce-scatter of bfloat16 gradients and the all-gather of weights in a ring."""
        return 2 * 2.0 * self.num_parameters if self.needs.weight_grad else 0.0

    @property
    def num_parameters(self) -> int:
        return sum(p.num_elements for layer in self.module.layers for p in layer.parameters())


class Systems:
    """The three systems on one workload, by the cost model of one GPU type.

    Args:
        workload: the model and its samples.
        execution: how DistTrain's and DistMM*'s layers run.
        monolithic: how Megatron-LM's do.
    """

    def __init__(
        self, workload: Workload, execution: Execution = STEPCCL, monolithic: Execution = SEQUENCE
    ) -> None:
        self.workload = workload
        self._cost = CostModel(machine(), execution)
        self._monolithic_cost = CostModel(machine(), monolithic)
        self._parts = _parts(workload)
        self._units = tuple(self._unit(part) for part in self._parts)

    @property
    def model(self) -> ModelGraph:
        """The model: encoder, LLM and generator in a chain."""
        encoder, llm, generator = (part.module for part in self._parts)
        return connect(self.workload.model, (encoder, llm, generator))

    def disttrain(self, num_gpus: int, batch: int) -> Result:
        """DistTrain: the best orchestration on at most that many GPUs; among equals the fewest GPUs."""
        return self._result(orchestrate(self._task(self._units, num_gpus, batch)), batch)

    def frugal(self, num_gpus: int, batch: int, forgone: float) -> Result:
        """DistTrain on the fewest GPUs where it takes at most `1 + forgone` times as long, by bisection."""
        fewest, most = 0, self.disttrain(num_gpus, batch)
        limit_s = most.iteration_s * (1 + forgone)
        while most.num_gpus - fewest > 1:
            middle = (most.num_gpus + fewest) // 2
            try:
                result = self.disttrain(middle, batch)
            except ValueError:  # nothing fits
                fewest = middle
                continue
            if result.iteration_s <= limit_s:
                most = result
            else:
                fewest = middle
        return most

    def by_flop(self, num_gpus: int, batch: int) -> Result:
        """DistMM*: GPUs in proportion to FLOP, then degrees that are best for each module on its own.

        The LLM's first, as if it were alone; then the fastest stage of each other module on its share, at
        as many samples side by side; a share in which a module does not fit grows until it does. The
        allocation ignores how modules interact.
        """
        shares = proportional_allocation([part.sample_flop for part in self._parts], num_gpus)
        task = self._task(self._units, num_gpus, batch)
        share_of = {unit.name: share for unit, share in zip(self._units, shares, strict=True)}
        (llm,) = (unit for unit in self._units if unit.name == task.pacing)
        alone = replace(llm, max_gpus=share_of[llm.name])
        (paced,) = orchestrate(replace(task, units=(alone,))).degrees
        degrees = [
            paced if unit is llm else _alone(task, unit, paced.dp, share_of[unit.name])
            for unit in self._units
        ]
        return self._result(evaluate(task, degrees), batch)

    def module_mfu(self) -> dict[str, float]:
        """MFU of every module on its own GPUs, without tensor parallelism, bubbles or reductions."""
        peak = self._cost.profile.peak(Precision.BFLOAT16)
        return {part.name: part.sample_flop / part.sample_s(self._cost, 1) / peak for part in self._parts}

    def monolithic(self, num_gpus: int, batch: int, llm_pp: int) -> Result:
        """Megatron-LM: one stage each for encoder and generator, TP 8, equal data parallelism.

        Encoder and generator are whole on every GPU of the group, and its images are divided among them.
        """
        dp = num_gpus // (NODE_GPUS * (llm_pp + 2))
        if dp < 1:
            raise ValueError(f"want at least {NODE_GPUS * (llm_pp + 2)} GPUs for one replica, got {num_gpus}")
        encoder, llm, generator = self._parts
        first, middle, last = (stage.total_s for stage in self.monolithic_stages(llm_pp))
        rounds = ceil(batch / (dp * MICROBATCH))
        iteration_s = first + llm_pp * middle + last + (rounds - 1) * max(first, middle, last)
        iteration_s += _reduction_s(llm, NODE_GPUS * llm_pp, dp)
        iteration_s += float_sum(_reduction_s(part, 1, dp * NODE_GPUS) for part in (encoder, generator))
        return self._result_of(num_gpus, iteration_s, batch)

    def monolithic_stages(self, llm_pp: int) -> tuple[StageTimes, StageTimes, StageTimes]:
        """Seconds of a microbatch on Megatron-LM's encoder, one of its LLM stages, and its generator."""
        encoder, llm, generator = self._parts
        whole = llm.passes_s(self._monolithic_cost, NODE_GPUS, llm.items)
        first, last = (self._replicated(part) for part in (encoder, generator))
        return first, StageTimes(whole.forward_s / llm_pp, whole.backward_s / llm_pp), last

    def _replicated(self, part: _Part) -> StageTimes:
        """Work of a sample's images divided among the GPUs of a group, each with the whole module."""
        return part.passes_s(self._monolithic_cost, 1, ceil(part.items / NODE_GPUS))

    def _unit(self, part: _Part) -> Unit:
        # frozen modules hold weights alone
        state = (4.0, 12.0) if part.needs.weight_grad else (2.0, 0.0)
        tokens = part.items * sum(row.tokens_in for row in part.item.rows)
        widths = sum(layer.out_width for layer in part.module.layers)
        is_split = part.name != "generator"  # its convolutions have no tensor parallelism here
        return Unit(
            name=part.name,
            sample_s=tuple((tp, part.sample_s(self._cost, tp)) for tp in (TP_SIZES if is_split else (1,))),
            num_layers=len(part.module.layers),
            weight_bytes=state[0] * part.num_parameters,
            optimizer_bytes=state[1] * part.num_parameters,
            activation_bytes=ACTIVATION_BYTES * tokens * widths / NODE_GPUS if part.needs.any else 0.0,
            reduction_bytes=part.reduction_bytes,
        )

    def _task(self, units: tuple[Unit, ...], num_gpus: int, batch: int) -> Task:
        return Task(
            units=units,
            pacing="llm",
            batch_samples=batch,
            microbatch_samples=MICROBATCH,
            num_gpus=num_gpus,
            gpu_bytes=GPU_BYTES,
            gpu_bytes_per_s=FABRIC_BYTES_PER_S,
        )

    def _result(self, orchestration: Orchestration, batch: int) -> Result:
        return self._result_of(orchestration.num_gpus, orchestration.iteration_s, batch)

    def _result_of(self, num_gpus: int, iteration_s: float, batch: int) -> Result:
        peak = self._cost.profile.peak(Precision.BFLOAT16)
        flop = batch * sum(part.sample_flop for part in self._parts)
        return Result(
            num_gpus=num_gpus,
            iteration_s=iteration_s,
            mfu=flop / (iteration_s * num_gpus * peak),
            samples_per_s=batch / iteration_s,
        )


def _alone(task: Task, unit: Unit, pace: int, share: int) -> Degrees:
    options = list(options_of(task, unit, pace))
    fitting = [option for option in options if option.num_gpus <= share]
    least = min((option.num_gpus for option in options), default=0)
    return min(fitting or [option for option in options if option.num_gpus == least]).degrees


def _reduction_s(part: _Part, num_shards: int, dp: int) -> float:
    """Seconds of a reduction: volume over bandwidth (section 4.2), for one shard per GPU."""
    return part.reduction_bytes / num_shards * (dp - 1) / dp / FABRIC_BYTES_PER_S


def _generator(latent_side: int, llm_width: int) -> Module:
    """Stable Diffusion 2.1 for images of the workload: the zoo's has the keys of 768 pixels a side."""
    unet = replace(STABLE_DIFFUSION_2_1, latent_side=latent_side)
    layers = behind_projector(unet_layers(unet), unet.prompt_width, llm_width)
    return Module(name="generator", modality=GENERATED, layers=layers)


def _parts(workload: Workload) -> tuple[_Part, _Part, _Part]:
    llm = from_shape(LLM_SHAPES[workload.model], module="llm")
    width = llm.layers[0].out_width
    patches = ((workload.images.read_px or workload.pixels) // PATCH) ** 2
    latents = (workload.pixels // LATENT) ** 2
    modules: Mapping[str, Module] = {
        "encoder": from_shape("vit-h-14", module="encoder", llm_width=width),
        "llm": llm,
        "generator": _generator(workload.pixels // LATENT, width),
    }
    works = {
        "encoder": (workload.images.read, Work((RowWork(patches, patches, patches**2),))),
        "llm": (1, Work((RowWork(TOKENS, TOKENS, TOKENS * (TOKENS + 1) // 2),))),
        "generator": (workload.images.drawn, Work((RowWork(latents, latents, latents**2),))),
    }
    encoder, llm_part, generator = (
        _Part(
            name=name,
            module=modules[name],
            items=works[name][0],
            item=works[name][1],
            needs=needs,
            calls=workload.images.calls,
        )
        for name, needs in zip(modules, workload.trained.value, strict=True)
    )
    return encoder, llm_part, generator
