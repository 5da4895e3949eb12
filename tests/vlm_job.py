"""The job of a small vision-language model whose plans are explained and compared."""

from pathlib import Path

import yaml

from sim.predict import predict, prices_of
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.explain.difference import Side
from workbench.explain.explanation import parts_of_all
from workbench.job.job import Job, job_from_spec
from workbench.job.schema import JobSpec
from workbench.memory.account import memory_table, peak_bytes
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.planner.stage_counts import silent
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept

H100 = CostModel(load_profile("H100"))
VLM = """
name: vlm
model:
  modules:
    vision:
      config: {model_type: siglip_vision_model, hidden_size: 768, intermediate_size: 3072,
               num_hidden_layers: 6, num_attention_heads: 12, image_size: 224, patch_size: 14,
               vision_use_head: false}
      trainable: projector
      projector: linear
    llm:
      config: {model_type: llama, vocab_size: 32000, hidden_size: 1024, intermediate_size: 2816,
               num_hidden_layers: 8, num_attention_heads: 16, num_key_value_heads: 8}
cluster: {device: H100, nodes: 1, ranks_per_node: 8}
batch:
  samples: 16
  replicas: 2
  mixture: {seed: 1, text_tokens: [64, 2048], items: {vision: {most: 3, missing: 0.25}}}
layouts:
  vision: {pp: 1}
  llm: {pp: 2}
profile: H100
"""


def vlm_job() -> Job:
    return job_from_spec(JobSpec.model_validate(yaml.safe_load(VLM)), folder=Path())


def planned(job: Job, strategy: str = "cornstarch") -> Plan:
    return PLANNERS[strategy](job, H100, silent)


def most_bytes(plan: Plan) -> int:
    """That any rank holds."""
    lowered = lower(plan)
    return max(peak_bytes(lowered, memory_table(lowered)).values())


def side(plan: Plan) -> Side:
    lowered, memory = accept(plan)
    trace = predict(lowered, memory, H100)
    return Side(lowered=lowered, trace=trace, parts=parts_of_all(lowered, H100, prices_of))
