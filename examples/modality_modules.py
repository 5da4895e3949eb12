"""Modality modules, specifications and callbacks: Cornstarch v1's Listings 1 and 2, on tiny models.

python examples/modality_modules.py  # starts its own four processes
torchrun --standalone --nproc-per-node 4 examples/modality_modules.py  # is one of them
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from runtime.frontend.callbacks import AnyRes, merge_special_tokens
from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import MultimodalParallelSpec
from workbench.job.notations.cornstarch import ParallelSpec

IMAGE, CLIP, STEPS = 62, 63, 6  # two special tokens, and how long to train


def after_encoder(inputs: dict[str, Any], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Between encoder and projector: the first block of an image, its overview, counts twice."""
    return tuple(x * (2.0 if k == 0 else 1.0) for (_, k), x in zip(inputs["items"], output, strict=True))


def after_projector(inputs: dict[str, Any], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Behind the projector, nothing changes."""
    del inputs
    return output


def make_model() -> MultimodalModule:
    """A CLIP vision tower that cuts large images into blocks, a Whisper encoder, and a Llama."""
    torch.manual_seed(0)
    vision = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=16,
            patch_size=8,
        )
    )  # fmt: skip
    audio = WhisperEncoder(
        WhisperConfig(
            d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=8,
            max_source_positions=8,
        )
    )  # fmt: skip
    llm = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=48, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=64
        )
    )
    token_ids = {"vision": IMAGE, "audio": CLIP}
    return MultimodalModule(
        encoders={
            "vision": ModalityModule(
                model=vision,
                projector="mlp",
                preprocess_callback=AnyRes(block_px=16),
                postprocess_module_callback=after_encoder,
                postprocess_projector_callback=after_projector,
            ),
            "audio": ModalityModule(audio, proj="linear"),
        },
        language_model=ModalityModule(llm),
        token_ids=token_ids,
        preprocess_callback=merge_special_tokens(token_ids),
    )


def make_batch() -> dict[str, Any]:
    """Four samples: an image and a clip, an image, a clip, text alone."""
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": [
            torch.tensor([1, IMAGE, 2, 3, CLIP, 4, 5]),
            torch.tensor([6, 7, IMAGE, 8, 9]),
            torch.tensor([CLIP, 10, 11, 12]),
            torch.tensor([13, 14, 15, 16, 17]),
        ],
        "pixel_values": [
            torch.rand(3, 24, 40, generator=generator),
            torch.rand(3, 32, 32, generator=generator),
            None,
            None,
        ],
        "input_features": [
            torch.rand(8, 16, generator=generator),
            None,
            torch.rand(8, 16, generator=generator),
            None,
        ],
    }


def main() -> None:
    mllm = make_model()
    mllm.vision_encoder.module.train(mode=False)  # frozen
    mllm.vision_encoder.projector.train(mode=True)

    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    spec = MultimodalParallelSpec(
        encoder_specs={
            "vision": ParallelSpec(tp_size=1, cp_size=1, pp_size=1),
            "audio": ParallelSpec(pp_size=1),
        },
        language_model_spec=ParallelSpec(pp_size=2),
        num_microbatches=4,
        microbatch_size=1,
    )
    optimizer = torch.optim.AdamW([p for p in mllm.parameters() if p.requires_grad], lr=3e-3)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with spec.apply(mllm) as parallel_mllm:
        for step in range(STEPS):
            output = parallel_mllm.execute(make_batch())
            optimizer.step()
            optimizer.zero_grad()
            if is_first:
                print(
                    f"step {step}: loss {output.loss:.6f} on ranks {', '.join(map(str, output.plan.ranks))}"
                )
        parallel_mllm.collect_weights()
    if is_first:
        print(f"in one process: loss {mllm(make_batch()).loss.item():.6f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
