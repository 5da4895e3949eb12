"""Encoder modules and a parallel module: the ICML listing of Cornstarch, on tiny models.

    python examples/encoder_modules.py
    torchrun --standalone --nproc-per-node 3 examples/encoder_modules.py

`MODALITY_PARALLELISM` may also be "colocated" (encoders share their ranks) or "replicated" (encoders on
every rank of the language model).
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from runtime.frontend.multimodal import EncoderModule, MultimodalModule
from runtime.frontend.parallel import MultimodalParallelModule
from workbench.job.notations.cornstarch import ParallelSpec

MODALITY_PARALLELISM = "parallel"
IMAGE, CLIP, STEPS = 62, 63, 6


def make_model() -> MultimodalModule:
    torch.manual_seed(0)
    vis = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16,
            patch_size=8,
        )
    )  # fmt: skip
    aud = WhisperEncoder(
        WhisperConfig(
            d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=8,
            max_source_positions=8,
        )
    )  # fmt: skip
    llm = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
        )
    )
    return MultimodalModule(
        encoders={
            "vision": EncoderModule(vis, proj="mlp"),
            "audio": EncoderModule(aud, proj="linear"),
        },
        language_model=llm,
        token_ids={"vision": IMAGE, "audio": CLIP},
    )


def batches() -> list[dict[str, Any]]:
    """The same two samples again and again; every special token becomes an item's tokens."""
    generator = torch.Generator().manual_seed(1)
    batch = {
        "input_ids": torch.tensor([[1, IMAGE, 2, 3, CLIP, 4], [5, 6, IMAGE, 7, CLIP, 8]]),
        "pixel_values": torch.rand(2, 3, 16, 16, generator=generator),
        "input_features": torch.rand(2, 8, 16, generator=generator),
    }
    return [batch] * STEPS


def main() -> None:
    mllm = make_model()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    dist_mllm = MultimodalParallelModule(
        mllm,
        modality_parallelism=MODALITY_PARALLELISM,
        encoder_specs={"vision": ParallelSpec(), "audio": ParallelSpec()},
        language_model_spec=ParallelSpec(),
        num_microbatches=2,
        microbatch_size=1,
    )
    optimizer = torch.optim.AdamW(mllm.parameters(), lr=3e-3)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with dist_mllm:
        for step, batch in enumerate(batches()):
            output = dist_mllm.execute(batch)
            optimizer.step()
            optimizer.zero_grad()
            if is_first:
                print(f"step {step}: loss {output.loss:.6f}")
        dist_mllm.collect_weights()
    if is_first:
        print(f"in one process: loss {mllm(batches()[0]).loss.item():.6f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
