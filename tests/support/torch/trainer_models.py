"""Models of transformers, tiny, and data for them, made on the spot; what trains them on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def bert() -> Any:
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=32, **SMALL)
    return transformers.BertForSequenceClassification(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, max_position_embeddings=32, eos_token_id=None, **SMALL
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
        decoder_start_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit() -> Any:
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=3, **SMALL)
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, Callable[[], Any]] = {"bert": bert, "llama": llama, "t5": t5, "vit": vit}


def examples(kind: str) -> list[dict[str, torch.Tensor]]:
    """16 examples for a model."""
    made = torch.Generator().manual_seed(0)
    found: list[dict[str, torch.Tensor]] = []
    for at in range(16):
        if kind == "vit":
            pixels = torch.randn(3, 16, 16, generator=made)
            found.append({"pixel_values": pixels, "labels": torch.tensor(at % 3)})
        else:
            ids = torch.randint(1, 64, (12,), generator=made)
            found.append({"input_ids": ids, "labels": torch.tensor(at % 2)})
            if kind != "bert":
                found[-1]["labels"] = ids
    return found


def reset() -> None:
    """Make accelerate forget the mode of the first Accelerator of the process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def accelerator(mode: str = "bf16", **settings: Any) -> Any:
    return Accelerator(mixed_precision=mode, cpu=True, **settings)


def trainer(**settings: Any) -> Any:
    args = transformers.TrainingArguments("unused", use_cpu=True, report_to=[], **settings)
    return transformers.Trainer(bert(), args)
