"""Models with random weights, built from configurations, for tests, benchmarks and the demo.

`build(name, size)` gives (module, args): `module(*args)` computes a scalar loss, the loss inside the module so that it
is part of the captured graph. Hugging Face models need the extra ``fxmem[hf]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Size = Literal["tiny", "small"]
Built = tuple[nn.Module, tuple[Tensor, ...]]


class LanguageModelLoss(nn.Module):
    """Next-token cross entropy of a causal language model from Hugging Face."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class TokenLoss(nn.Module):
    """Cross entropy of a token-level model (BERT's masked language model)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(input_ids=ids).logits.flatten(0, 1), labels.flatten())


class Seq2SeqLoss(nn.Module):
    """Cross entropy of an encoder-decoder model (T5)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, decoder_input_ids=decoder_ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), decoder_ids[:, 1:].flatten())


class ClassifierLoss(nn.Module):
    """Cross entropy of an image classifier from Hugging Face (ViT, ResNet)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(pixel_values=pixels).logits, labels)


class UNetBlock(nn.Module):
    """Two 3x3 convolutions, each with GroupNorm and SiLU."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, num_out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(x)))


class UNetLoss(nn.Module):
    """A four-level U-Net with skip connections; mean squared error against a target image of the same shape."""

    def __init__(self, width: int, num_levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(num_levels)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(UNetBlock(a, b) for a, b in zip([width, *widths], widths, strict=False))
        self.middle = UNetBlock(widths[-1], widths[-1])
        outs = [*widths[-2::-1], width]
        self.up = nn.ModuleList(UNetBlock(2 * w, out) for w, out in zip(widths[::-1], outs, strict=True))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1))
        return F.mse_loss(self.head(x), target)


class MLPLoss(nn.Module):
    """Residual blocks of LayerNorm, linear, GELU, linear; mean squared error."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_blocks)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, target)


def _gpt2(size: Size, dropout: float = 0.0) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, vocab, batch, length = (2, 32, 128, 2, 16) if size == "tiny" else (6, 256, 8192, 4, 256)
    config = GPT2Config(
        vocab_size=vocab, n_positions=length, n_embd=width, n_layer=layers, n_head=4,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LanguageModelLoss(GPT2LMHeadModel(config)), (_ids(vocab, batch, length),)


def _gpt2_dropout(size: Size) -> Built:
    return _gpt2(size, dropout=0.1)


def _llama(size: Size) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, vocab, batch, length = (2, 32, 128, 2, 16) if size == "tiny" else (6, 256, 8192, 4, 256)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=length,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LanguageModelLoss(LlamaForCausalLM(config)), (_ids(vocab, batch, length),)


def _bert(size: Size) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    layers, width, vocab, batch, length = (2, 32, 128, 2, 16) if size == "tiny" else (6, 256, 8192, 4, 256)
    config = BertConfig(
        vocab_size=vocab, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * width, max_position_embeddings=length,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return TokenLoss(BertForMaskedLM(config)), (_ids(vocab, batch, length), _ids(vocab, batch, length))


def _t5(size: Size) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    layers, width, vocab, batch, length = (2, 32, 128, 2, 12) if size == "tiny" else (4, 256, 8192, 4, 128)
    config = T5Config(
        vocab_size=vocab, d_model=width, d_kv=width // 4, d_ff=4 * width, num_layers=layers, num_heads=4,
        dropout_rate=0.0,
    )  # fmt: skip
    return Seq2SeqLoss(T5ForConditionalGeneration(config)), (_ids(vocab, batch, length), _ids(vocab, batch, length))


def _vit(size: Size) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    layers, width, batch, pixels = (2, 32, 2, 32) if size == "tiny" else (6, 256, 8, 128)
    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=4 * width,
        image_size=pixels, patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ClassifierLoss(ViTForImageClassification(config)), (torch.randn(batch, 3, pixels, pixels), _ids(2, batch))


def _resnet50(size: Size) -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    batch, pixels = (2, 32) if size == "tiny" else (8, 112)
    widths: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [16, 32, 64, 128]} if size == "tiny" else {}
    config = ResNetConfig(depths=[3, 4, 6, 3], layer_type="bottleneck", **widths)
    return ClassifierLoss(ResNetForImageClassification(config)), (
        torch.randn(batch, 3, pixels, pixels),
        _ids(2, batch),
    )


def _unet(size: Size) -> Built:
    width, batch, pixels = (8, 2, 32) if size == "tiny" else (16, 4, 128)
    return UNetLoss(width), (torch.randn(batch, 3, pixels, pixels), torch.randn(batch, 3, pixels, pixels))


def _mlp(size: Size) -> Built:
    width, blocks, batch = (16, 4, 8) if size == "tiny" else (256, 12, 512)
    return MLPLoss(width, blocks), (torch.randn(batch, width), torch.randn(batch, width))


def _ids(vocab: int, *shape: int) -> Tensor:
    return torch.randint(vocab, shape)


_BUILDERS: dict[str, Callable[[Size], Built]] = {
    "gpt2": _gpt2,
    "gpt2_dropout": _gpt2_dropout,
    "llama": _llama,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "resnet50": _resnet50,
    "unet": _unet,
    "mlp": _mlp,
}
NAMES = tuple(_BUILDERS)


def build(name: str, size: Size = "tiny", *, seed: int = 0) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model `name` (one of NAMES) in training mode and its arguments; same seed, same weights and data.

    The global random state is left as it was. Raises KeyError for an unknown name.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, args = _BUILDERS[name](size)
    return module.train(), args
