"""The small language model that is trained under faults, and its losses in one undisturbed process."""

from functools import cache
from pathlib import Path

import torch

from runtime.data.batches import SyntheticSource
from runtime.elastic.job import plan_step
from runtime.elastic.local_nodes import Shape
from runtime.elastic.replan import start_layout
from runtime.elastic.run import elastic_job
from runtime.elastic.step_data import drawn
from runtime.reference import Reference
from workbench.job.job import load_job
from workbench.job.machines import cost_of
from workbench.plan.codec import read_plan
from workbench.strategies.elastic_templates import elastic_templates

RUN_STEPS, ELASTIC_STEPS = 40, 30
SEED = 0
NODES = 3
JOB = """
name: chaos
model:
  modules:
    llm:
      config: {{model_type: llama, vocab_size: 64, hidden_size: 32, intermediate_size: 48,
               num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2,
               max_position_embeddings: 128, tie_word_embeddings: true}}
cluster:
  local: {{ranks: {ranks}, cores: 2}}
  memory_gib: 1
  intra: {{gb_per_s: 1.0, latency_us: 100.0}}
batch:
  samples: {samples}
  fixed: {{text_tokens: 16}}
layouts:
  llm: {{pp: 2}}
precision: float64
profile: H100
"""


def write_job(path: Path, *, ranks: int, samples: int = 4) -> None:
    path.write_text(JOB.format(ranks=ranks, samples=samples))


@cache
def run_losses(plan: Path) -> tuple[float, ...]:
    """Losses of all steps of a run of the plan."""
    reference = Reference(read_plan(plan), seed=SEED, dtype=torch.float64)
    source = SyntheticSource(SEED)
    return tuple(reference.step(source).loss for _ in range(RUN_STEPS))


@cache
def elastic_losses(job: Path) -> tuple[float, ...]:
    """Losses of all steps of elastic training of the job, with new samples in every step."""
    shape = Shape(job=load_job(job), nodes=NODES, ranks_per_node=1, trace=None)
    reads = drawn(shape.on_nodes(), SEED)
    templates = elastic_templates(reads.job, cost_of(shape.job, None, None), num_nodes=NODES, num_faults=1)
    trained = elastic_job(templates, reads, seed=SEED, wait_s=1.0, num_cores=1)
    layout = start_layout(trained, [f"node{number}" for number in range(NODES)])
    reference = Reference(
        plan_step(trained, layout, reads.batch(0)),
        seed=SEED,
        dtype=torch.float64,
        optimizer=trained.optimizer,
    )
    losses = []
    for step in range(ELASTIC_STEPS):
        reference.plan = plan_step(trained, layout, reads.batch(step))
        losses.append(reference.step(reads.source).loss)
    return tuple(losses)
