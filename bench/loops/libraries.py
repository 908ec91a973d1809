"""Loops over models of other libraries, called as their documentation calls them; see `bench.loops.zoo`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.loops.zoo import Compile, Steps, loop, sgd, update


def with_labels(
    model: Any, batches: Iterable[dict[str, Tensor]], kept: dict[str, Any] | None = None
) -> Steps:
    """`model(**batch).loss`, the output kept through backward as in most scripts; in `kept`, until the next comes."""

    def step(model: Any, batch: dict[str, Tensor], kept: dict[str, Any] | None) -> Tensor:
        outputs = model(**batch)
        if kept is not None:
            kept["outputs"] = outputs
        outputs.loss.backward()
        loss: Tensor = outputs.loss
        return loss

    optimizer = sgd(model)
    for batch in batches:
        yield partial(step, model, batch, kept)
        update(optimizer)


def text(rows: int, length: int, num_labels: int | None = None, vocab: int = 64) -> dict[str, Tensor]:
    """Token ids with labels: the ids themselves, or a class a row."""
    ids = torch.randint(vocab, (rows, length))
    return {"input_ids": ids, "labels": ids if num_labels is None else torch.randint(num_labels, (rows,))}


def gpt2(vocab: int, width: int) -> Any:
    """A tiny causal language model, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab, n_positions=64, n_embd=width, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@loop(share=0.7)
def gpt2_labels(compile_: Compile) -> Steps:
    """A causal language model from Hugging Face."""
    return with_labels(compile_(gpt2(64, 32)), (text(16, 64) for _ in range(4)))


@loop(share=0.6)
def gpt2_outputs_kept(compile_: Compile) -> Steps:
    """A script's loop: `outputs` is a variable that keeps logits (2 MiB) until the next call returns."""
    return with_labels(compile_(gpt2(1024, 64)), (text(8, 64, vocab=1024) for _ in range(6)), kept={})


@loop(share=0.7)
def vit_labels(compile_: Compile) -> Steps:
    """An image classifier from Hugging Face."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    images = ({"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(2, (8,))} for _ in range(4))
    return with_labels(compile_(ViTForImageClassification(config)), images)


def bert() -> Any:
    """A tiny BERT for classification."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = 3
    return BertForSequenceClassification(config)


@loop(share=0.7)
def bert_labels(compile_: Compile) -> Steps:
    """A text classifier from Hugging Face: it sets an attribute in its first call."""
    return with_labels(compile_(bert()), (text(16, 64, num_labels=3) for _ in range(4)))


@loop(share=0.7)
def bert_padded(compile_: Compile) -> Steps:
    """The same with attention masks, lengths that change, and a partial batch."""
    batches = [text(rows, length, 3) for _ in range(2) for rows, length in ((16, 64), (16, 48), (10, 64))]
    for batch in batches:
        batch["attention_mask"] = (torch.rand(batch["input_ids"].shape) < 0.9).long()
    return with_labels(compile_(bert()), batches)


@loop()
def faster_rcnn(compile_: Compile) -> Steps:
    """Detection with torchvision: many graphs, sizes that depend on data. Raises ImportError without torchvision."""
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.rpn import AnchorGenerator
    from torchvision.ops import MultiScaleRoIAlign

    layers = (nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()) for a, b in ((3, 16), (16, 32), (32, 32)))
    backbone = nn.Sequential(*layers)
    backbone.out_channels = 32  # type: ignore[assignment]
    detector = FasterRCNN(
        backbone, min_size=192, max_size=192, rpn_anchor_generator=AnchorGenerator(((16, 32),), ((0.5, 1.0),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 4, 2), box_head=TwoMLPHead(32 * 16, 64),
        box_predictor=FastRCNNPredictor(64, 3), rpn_pre_nms_top_n_train=200, rpn_post_nms_top_n_train=50,
    )  # fmt: skip
    model = compile_(detector)

    def step(model: Any, images: Sequence[Tensor], targets: Sequence[dict[str, Tensor]]) -> Tensor:
        loss: Tensor = sum(model(images, targets).values())
        loss.backward()
        return loss

    optimizer = sgd(model)
    for _ in range(4):
        images = [torch.rand(3, 192, 192) for _ in range(2)]
        corner = torch.rand(3, 2) * 40
        boxes = torch.cat([corner, corner + 20 + torch.rand(3, 2) * 30], dim=1)
        targets = [{"boxes": boxes, "labels": torch.randint(1, 3, (3,))}] * 2
        yield partial(step, model, images, targets)
        update(optimizer)
