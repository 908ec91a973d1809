"""Architectures with random weights, called as their documentation calls them, at three budgets of eager's peak.

`ARCHITECTURES[name]()` gives a module in training mode and the keyword arguments of its call; its loss is `.loss` of
what it returns, or what it returns. Nothing is downloaded. A library that is not installed is an ImportError.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from bench.common import Row
from bench.isolated import shortened
from bench.recorder import Recorder, StepRecord, gradient_error

SHARES = (0.9, 0.75, 0.6)
MAX_STEPS = 6  # a measured excess may be planned again three times
VOCAB, ROWS, LENGTH, WIDTH, PIXELS = 128, 8, 64, 32, 32

Built = tuple[nn.Module, dict[str, Any]]
Named = tuple[str, str, dict[str, Any]]  # config, model, options of the config

COMMON = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 4 * WIDTH, "max_position_embeddings": LENGTH, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
CAUSAL: dict[str, Named] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_positions": LENGTH}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": 16}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 4 * WIDTH, "word_embed_proj_dim": WIDTH}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {}),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"state_size": 4}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
}
MASKED: dict[str, Named] = {
    "bert": ("BertConfig", "BertForMaskedLM", {}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {"max_position_embeddings": LENGTH + 2}),
    "distilbert": (
        "DistilBertConfig", "DistilBertForMaskedLM", {"dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
    ),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {"embedding_size": 16}),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", {"embedding_size": 16}),
    "deberta_v2": (
        "DebertaV2Config", "DebertaV2ForMaskedLM", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
}  # fmt: skip
DECODER = {
    "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2,
}  # fmt: skip
SEQ2SEQ: dict[str, Named] = {
    "t5": (
        "T5Config", "T5ForConditionalGeneration",
        {"d_model": WIDTH, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", DECODER),
}  # fmt: skip
IMAGES: dict[str, Named] = {
    "vit": ("ViTConfig", "ViTForImageClassification", {**COMMON, "image_size": PIXELS, "patch_size": 4}),
    "swin": (
        "SwinConfig", "SwinForImageClassification",
        {"image_size": PIXELS, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4],
         "window_size": 4},
    ),
    "convnext": (
        "ConvNextConfig", "ConvNextForImageClassification", {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]},
    ),
    "resnet": (
        "ResNetConfig", "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "bottleneck"},
    ),
    "mobilenet_v2": (
        "MobileNetV2Config", "MobileNetV2ForImageClassification", {"image_size": PIXELS, "depth_multiplier": 0.25},
    ),
}  # fmt: skip


def _transformers(config: str, model: str, options: Mapping[str, Any]) -> nn.Module:
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return made


def _text(names: Named) -> Built:
    """Token ids that are their own labels."""
    config, model, options = names
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH))
    return _transformers(config, model, {**COMMON, **options}), {"input_ids": ids, "labels": ids}


def _seq2seq(names: Named) -> Built:
    module, inputs = _text(names)
    return module, {**inputs, "labels": torch.randint(3, VOCAB, (ROWS, LENGTH // 2))}


def _images(names: Named) -> Built:
    config, model, options = names
    inputs = {"pixel_values": torch.randn(ROWS, 3, PIXELS, PIXELS), "labels": torch.randint(2, (ROWS,))}
    return _transformers(config, model, options), inputs


def _bert_classifier() -> Built:
    module = _transformers("BertConfig", "BertForSequenceClassification", {**COMMON, "num_labels": 3})
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH))
    mask = (torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH, (ROWS, 1))).long()
    return module, {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(3, (ROWS,))}


def _segformer() -> Built:
    options = {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [4, 2], "hidden_sizes": [16, 32], "patch_sizes": [7, 3],
        "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [4, 4], "decoder_hidden_size": 32,
        "num_labels": 5,
    }  # fmt: skip
    module = _transformers("SegformerConfig", "SegformerForSemanticSegmentation", options)
    pixels = torch.randn(ROWS, 3, 64, 64)
    return module, {"pixel_values": pixels, "labels": torch.randint(5, (ROWS, 64, 64))}


def _whisper() -> Built:
    options = {
        **COMMON, **DECODER, "num_mel_bins": 16, "max_source_positions": 64, "max_target_positions": 32,
    }  # fmt: skip
    module = _transformers("WhisperConfig", "WhisperForConditionalGeneration", options)
    return module, {"input_features": torch.randn(ROWS, 16, 128), "labels": torch.randint(3, VOCAB, (ROWS, 24))}


def _wav2vec2() -> Built:
    options = {
        **COMMON, "conv_dim": (16, 16, 16), "conv_kernel": (10, 3, 3), "conv_stride": (5, 2, 2),
        "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
        "apply_spec_augment": False, "layerdrop": 0.0,
    }  # fmt: skip
    module = _transformers("Wav2Vec2Config", "Wav2Vec2ForCTC", options)
    return module, {"input_values": torch.randn(ROWS, 2000), "labels": torch.randint(3, VOCAB, (ROWS, 12))}


def _clip() -> Built:
    text = {**COMMON, "eos_token_id": 2}
    vision = {**COMMON, "image_size": PIXELS, "patch_size": 4}
    del vision["vocab_size"]
    module = _transformers(
        "CLIPConfig", "CLIPModel", {"text_config": text, "vision_config": vision, "projection_dim": 16}
    )
    ids, pixels = torch.randint(3, VOCAB, (ROWS, LENGTH)), torch.randn(ROWS, 3, PIXELS, PIXELS)
    return module, {"input_ids": ids, "pixel_values": pixels, "return_loss": True}


class Classifier(nn.Module):
    """An image model of timm or torchvision with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


def _classifier(module: str, name: str, **options: Any) -> Built:
    """The function or class `name` of a library of image models."""
    model = getattr(importlib.import_module(module), name)(num_classes=10, **options)
    return Classifier(model), {"images": torch.randn(ROWS, 3, 64, 64), "labels": torch.randint(10, (ROWS,))}


class Denoiser(nn.Module):
    """A diffusion model with the loss of its usual training script."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, noisy: Tensor, timesteps: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(self.model(noisy, timesteps).sample, noise)


def _diffusers_unet() -> Built:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=PIXELS, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    image = torch.randn(ROWS, 3, PIXELS, PIXELS)
    inputs = {"noisy": image, "timesteps": torch.randint(1000, (ROWS,)), "noise": torch.randn_like(image)}
    return Denoiser(model), inputs


ARCHITECTURES: dict[str, Callable[[], Built]] = {
    **{name: partial(_text, names) for name, names in (CAUSAL | MASKED).items()},
    **{name: partial(_seq2seq, names) for name, names in SEQ2SEQ.items()},
    **{name: partial(_images, names) for name, names in IMAGES.items()},
    "bert_classifier": _bert_classifier,
    "segformer": _segformer,
    "whisper": _whisper,
    "wav2vec2": _wav2vec2,
    "clip": _clip,
    "diffusers_unet": _diffusers_unet,
    "timm_mobilenetv3": partial(_classifier, "timm.models", "mobilenetv3_small_050"),
    "timm_mixer": partial(
        _classifier, "timm.models", "MlpMixer", img_size=64, embed_dim=32, num_blocks=2, patch_size=8
    ),
    "torchvision_densenet": partial(
        _classifier, "torchvision.models", "DenseNet", growth_rate=8, block_config=(2, 2, 2), num_init_features=16
    ),
    "torchvision_shufflenet": partial(_classifier, "torchvision.models", "shufflenet_v2_x0_5"),
}


def model_rows(name: str) -> list[Row]:
    """A row a budget of the architecture `name`, in this process, with a cost cache that is empty at first."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FXMEM_CACHE"] = folder
        try:
            eager, _ = _taken(name, Recorder(lambda module: module))
        except Exception as error:
            return [{**no_row(name), "outcome": "none", "detail": f"eager: {shortened(error)}"}]
        return [_row(name, share, eager) for share in SHARES]


def no_row(name: str) -> Row:
    """Every column, of a run that showed nothing yet."""
    columns = "share outcome eager_bytes budget_bytes predicted_bytes measured_bytes error_pct grad_error graphs plans"
    return {"case": name, **dict.fromkeys(columns.split()), "first_s": None, "detail": ""}


def _row(name: str, share: float, eager: list[StepRecord]) -> Row:
    torch.compiler.reset()
    eager_bytes = max(record.peak_bytes for record in eager)
    budget_bytes = int(share * eager_bytes)
    recorder = Recorder(partial(fxmem.compile, budget=budget_bytes))
    row = {**no_row(name), "share": share, "eager_bytes": eager_bytes, "budget_bytes": budget_bytes}
    try:
        records, module = _taken(name, recorder)
    except Exception as error:
        recorder.notice_plans()
        row |= {"graphs": len(recorder.graphs), "plans": len(recorder.plans)}  # those before the refused one
        if isinstance(error, fxmem.BudgetInfeasible):
            smallest = f"smallest is {error.min_bytes / eager_bytes:.3f}: {shortened(error)}"
            return {**row, "outcome": "infeasible", "detail": smallest}
        return {**row, "outcome": "raises", "detail": shortened(error)}
    measured_bytes, predicted_bytes = records[-1].peak_bytes, module.plan.peak_bytes
    errors = (gradient_error(a.gradients, b.gradients) for a, b in zip(records, eager, strict=False))
    grad_error = max(error for error in errors if error is not None)
    return {
        **row,
        "outcome": "over" if measured_bytes > budget_bytes else "differs" if grad_error > 1e-4 else "held",
        "predicted_bytes": predicted_bytes,
        "measured_bytes": measured_bytes,
        "error_pct": 100 * (predicted_bytes / measured_bytes - 1),
        "grad_error": grad_error,
        "graphs": len(recorder.graphs),
        "plans": len(recorder.plans),
        "first_s": records[0].seconds,
    }


def _taken(name: str, recorder: Recorder) -> tuple[list[StepRecord], Any]:
    """Steps until nothing is planned in two that follow each other; the compiled module."""
    torch.manual_seed(0)
    built, inputs = ARCHITECTURES[name]()
    module = recorder(built.train())

    def step() -> Tensor:
        outputs = module(**inputs)
        loss: Tensor = outputs if isinstance(outputs, Tensor) else outputs.loss
        loss.backward()
        return loss

    records: list[StepRecord] = []
    while len(records) < MAX_STEPS and not (len(records) > 2 and not any(r.planned for r in records[-2:])):
        torch.manual_seed(len(records))
        records.append(recorder.record(step))
        built.zero_grad()
    return records, module
