"""The suite: setups of five papers, a shipped job, three models of a hub, drawn data, prices, failures.

Layouts are left open everywhere: the search is over tp, cp, pp and dp of every module. Devices are the same
for all searches, `Job.cluster` up to `Job.max_ranks`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from experiments.cornstarch.end_to_end import NUM_GPUS
from experiments.cornstarch.frozen_tables import CLIPS, IMAGES, TEXT_TOKENS
from experiments.cornstarch.modelled import A40, a40_cost
from experiments.cornstarch.models import icml_model, v1_model
from experiments.cornstarch.planned import testbed
from experiments.disttrain import simulated as disttrain
from experiments.entrain import workload as entrain
from experiments.harness.record import FOLDER
from experiments.mimo import models as mimo
from workbench.cost.hardware import Node, uniform
from workbench.cost.model import CostModel
from workbench.data.corpus import ItemTokens, fixed_samples
from workbench.data.sample import Sample
from workbench.job.draft import Train, draft, machines_of
from workbench.job.job import Job, job_from_spec, load_job
from workbench.job.job_file import parse_spec
from workbench.job.machines import cost_of
from workbench.model.model_graph import ModelGraph
from workbench.model.zoo import from_shape
from workbench.plan.plan import ModuleSettings, Settings, Sharding
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.options import ObjectiveOptions

EXAMPLES = FOLDER.parent / "examples"
CONFIGS = Path(__file__).parent / "models"
QWEN_IMAGE = ItemTokens(2 * 2 * 256, 256)  # 448 x 448 pixels: patches, and what 2 x 2 of them become


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteJob:
    """One job of the suite.

    Args:
        name: as `--job` takes it.
        source: paper and setup, or file.
        differs: difference from the source, in a line; empty: only open layouts.
        make: makes the job.
        cost: its cost model.
        objective: what is minimised.
        objective_options: parameters of the objective.
        batches: drawn samples of further steps, over which the objective is averaged; empty: the job's own.
    """

    name: str
    source: str
    make: Callable[[], Job]
    differs: str = ""
    cost: Callable[[Job], CostModel] = lambda job: cost_of(job, None, None)
    objective: Objective = Objective.ITERATION
    objective_options: ObjectiveOptions = field(default_factory=ObjectiveOptions)
    batches: Callable[[], tuple[tuple[Sample, ...], ...]] = field(default=tuple)


def opened(job: Job) -> Job:
    """The job without layouts, sharding or recomputation."""
    settings = replace(job.settings, modules=())
    return replace(job, layouts=(), replicas=1, settings=settings)


def _cornstarch_v1() -> Job:
    model = v1_model("VALM-SM", "M")
    items = {"vision": (IMAGES[0],), "audio": (CLIPS[0],)}
    return _on_a40(model, items, gpus=NUM_GPUS, samples=24)


def _cornstarch_icml() -> Job:
    model = icml_model("SSS")
    return _on_a40(model, {"vision": (QWEN_IMAGE,), "audio": (CLIPS[0],)}, gpus=12, samples=24)


def _on_a40(
    model: ModelGraph, items: Mapping[str, tuple[ItemTokens, ...]], *, gpus: int, samples: int
) -> Job:
    used = {module.modality for module in model.encoders}
    return Job(
        name=model.name,
        model=model,
        cluster=testbed(gpus, a40_cost()),
        batch=fixed_samples(
            samples,
            text_tokens=TEXT_TOKENS,
            items={name: each for name, each in items.items() if name in used},
        ),
        profile=A40,
    )


def _megatron() -> Job:
    workload = mimo.Workload(
        encoder="1B", llm="7B", sequence_tokens=8192, vision_pct=50.0, num_gpus=16, num_samples=16
    )
    return mimo.job_of(workload, mimo.assumptions())


def _entrain_batches() -> tuple[tuple[Sample, ...], ...]:
    return tuple(entrain.batch_of("LLaVA-150k", 32, seed) for seed in range(4))


def _oobleck() -> Job:
    """GPT-3 2.7b on nodes of one A40 each."""
    profile = a40_cost().profile
    node = Node(device=A40, num_ranks=1, memory_bytes=profile.memory_bytes)
    link = profile.machine_link("inter").link
    model = ModelGraph(name="gpt3-2.7b", modules=(from_shape("gpt3-2.7b", module="llm"),))
    return Job(
        name="gpt3-2.7b",
        model=model,
        cluster=uniform("a40-nodes", node, num_nodes=16, intra=link, inter=link),
        batch=fixed_samples(64, text_tokens=2048, items={}),
        microbatch_samples=2,
        settings=Settings(modules=(ModuleSettings(module="llm", sharding=Sharding.OPTIMIZER),)),
        profile=A40,
    )


def _failing() -> Job:
    job = load_job(EXAMPLES / "spot-cluster" / "job.yaml")
    return replace(job, batch=job.batch[:32])


def _of_hub(folder: Path, gpus: str, samples: int) -> Job:
    """The job that `workbench init` writes for a model's config, with fewer samples of a step."""
    drafted = draft(
        str(folder / "config.json"),
        machines_of(gpus, None),
        train=Train.LLM,
    )
    job = job_from_spec(parse_spec(drafted.text, where=folder.name), folder=folder)
    return replace(job, batch=job.batch[:samples])


_ALL = (
    SuiteJob(
        name="cornstarch-v1",
        source="Cornstarch v1, sections 6.1 and 6.2.2: VALM-SM on 6 nodes of 4 A40, 24 samples",
        make=_cornstarch_v1,
    ),
    SuiteJob(
        name="cornstarch-icml",
        source="Cornstarch ICML, section 5.1: MLLM-SSS on nodes of 4 A40, 24 samples",
        differs="3 nodes of 6, images of 448 x 448 pixels and clips of 30 s",
        make=_cornstarch_icml,
    ),
    SuiteJob(
        name="megatron",
        source="Karnati et al., section 4: 1B + 7B, sequences of 8K, half of them vision, on H100",
        differs="16 GPUs and 16 samples",
        make=_megatron,
        cost=lambda _: mimo.machine(),
    ),
    SuiteJob(
        name="entrain",
        source="Entrain, section 4.7: SynthChartNet, Llama 3.2 1B, one replica's 16 A40",
        differs="64 samples of a corpus that stands for the data set, of 512",
        make=lambda: entrain.job_of("SynthChartNet", "Llama3-1b", entrain.batch_of("SynthChartNet", 64, 0)),
    ),
    SuiteJob(
        name="disttrain",
        source="DistTrain, section 7: MLLM-9B with encoder and generator, A100",
        differs="16 GPUs and 16 samples",
        make=lambda: disttrain.job_of("MLLM-9B", nodes=2, batch=16),
    ),
    SuiteJob(
        name="oobleck",
        source="Oobleck, Table 2.1: GPT-3 2.7b, nodes of one A40, microbatches of 2",
        differs="16 nodes of 30 and 64 samples of 1,024",
        make=_oobleck,
    ),
    SuiteJob(name="valm", source="examples/valm.yaml", make=lambda: load_job(EXAMPLES / "valm.yaml")),
    SuiteJob(
        name="llava-1.5-7b",
        source="examples/llava-1.5-7b/config.json by `workbench init`, 16 H100",
        differs="32 samples",
        make=lambda: _of_hub(EXAMPLES / "llava-1.5-7b", "16xH100", 32),
    ),
    SuiteJob(
        name="qwen2.5-vl-7b",
        source="config.json of Qwen/Qwen2.5-VL-7B-Instruct by `workbench init`, 16 H100",
        differs="32 samples",
        make=lambda: _of_hub(CONFIGS / "qwen2.5-vl-7b", "16xH100", 32),
    ),
    SuiteJob(
        name="qwen3-vl-30b-a3b",
        source="examples/moe-vlm-64-h100/config.json by `workbench init`, 16 H100",
        differs="16 samples",
        make=lambda: _of_hub(EXAMPLES / "moe-vlm-64-h100", "16xH100", 16),
    ),
    SuiteJob(
        name="varying",
        source="Entrain, section 4.7: LLaVA-150k, Llama 3.2 1B, 16 A40; the mean over four drawn batches",
        differs="32 samples a batch",
        make=lambda: entrain.job_of("LLaVA-150k", "Llama3-1b", _entrain_batches()[0]),
        batches=_entrain_batches,
    ),
    SuiteJob(
        name="pools",
        source="examples/pools.yaml, dollars a sample",
        make=lambda: load_job(EXAMPLES / "pools.yaml"),
        objective=Objective.DOLLARS,
    ),
    SuiteJob(
        name="failures",
        source="examples/spot-cluster/job.yaml, one of the eight nodes is lost every 2.5 hours",
        differs="32 samples of 64",
        make=_failing,
        objective=Objective.GOODPUT,
        objective_options=ObjectiveOptions(mtbf="150m"),
    ),
)

JOBS: Mapping[str, SuiteJob] = {job.name: job for job in _ALL}
