"""A small job.yaml for tests, and ways to change it."""

from pathlib import Path

import yaml

JOB = """
name: small
model:
  modules:
    vision: {config: {model_type: siglip_vision_model, hidden_size: 16, intermediate_size: 24,
                      num_hidden_layers: 2, num_attention_heads: 2, image_size: 8, patch_size: 4},
             trainable: projector, projector: mlp}
    llm: {config: {model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
                   num_attention_heads: 2, vocab_size: 64}, trainable: none}
cluster:
  local: {ranks: 3, cores: 2}
  memory_gib: 1
  intra: {gb_per_s: 1.0, latency_us: 50}
batch:
  samples: 4
  fixed: {text_tokens: 10, items: {vision: {each: 2}}}
layouts:
  llm: {pp: 2, recompute: full}
precision: float32
profile: cpu.json
"""


def write(tmp_path: Path, change=lambda data: None) -> Path:
    data = yaml.safe_load(JOB)
    change(data)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    return file


def put(*path, value):
    """A change: set one key, or delete it (value ...)."""

    def change(data):
        for key in path[:-1]:
            data = data[key]
        if value is ...:
            del data[path[-1]]
        else:
            data[path[-1]] = value

    return change
