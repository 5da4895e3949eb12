"""The command `workbench`, called in this process on a small job: what it takes, says and refuses."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from workbench.cli.app import app

JOB = """
name: small
model:
  modules:
    vision:
      config: {model_type: siglip_vision_model, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
               num_attention_heads: 2, image_size: 32, patch_size: 8, vision_use_head: false}
      trainable: projector
      projector: linear
    audio:
      config: {model_type: whisper, d_model: 32, encoder_layers: 2, encoder_attention_heads: 2,
               encoder_ffn_dim: 64, num_mel_bins: 80, max_source_positions: 20}
      trainable: projector
      projector: linear
    llm:
      config: {model_type: llama, vocab_size: 259, hidden_size: 32, intermediate_size: 64,
               num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1,
               max_position_embeddings: 512, tie_word_embeddings: false}
cluster:
  local: {ranks: 4, cores: 2}
  memory_gib: 1
  intra: {gb_per_s: 1.0, latency_us: 100.0}
batch:
  samples: 4
  fixed: {text_tokens: 16, items: {vision: {each: 1}, audio: {each: 1}}}
layouts:
  vision: {pp: 1}
  audio: {pp: 1}
  llm: {pp: 2}
precision: float32
profile: H100
"""


def workbench(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="workbench")


def accept(*arguments: object) -> Result:
    result = workbench(*arguments)
    assert result.exit_code == 0, f"{result.output}{result.exception!r}"
    return result


def answered(*arguments: object) -> dict[str, Any]:
    """The last line of `--json`."""
    return json.loads(accept(*arguments, "--json").stdout.splitlines()[-1])


def refuse(*arguments: object, words: str, folder: Path) -> None:
    """Exit code 2, one line that holds the words, nothing on stdout, nothing left behind."""
    before = sorted(folder.rglob("*"))
    result = workbench(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("workbench: error: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith("\n")
    for word in words.split("|"):
        assert word in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output
    assert sorted(folder.rglob("*")) == before
