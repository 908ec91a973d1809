"""Loops over models of other libraries, called as their documentation calls them; see `bench.loops_zoo`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.loops_zoo import Compile, Steps, loop, sgd, update


def with_labels(model: Any, batches: Iterable[dict[str, Tensor]]) -> Steps:
    """`model(**batch).loss`, the output kept through backward as in most scripts."""

    def step(model: Any, batch: dict[str, Tensor]) -> Tensor:
        outputs = model(**batch)
        outputs.loss.backward()
        loss: Tensor = outputs.loss
        return loss

    optimizer = sgd(model)
    for batch in batches:
        yield partial(step, model, batch)
        update(optimizer)


def text(rows: int, length: int, num_labels: int | None = None) -> dict[str, Tensor]:
    """Token ids with labels: the ids themselves, or a class a row."""
    ids = torch.randint(64, (rows, length))
    return {"input_ids": ids, "labels": ids if num_labels is None else torch.randint(num_labels, (rows,))}


@loop(share=0.7)
def gpt2_labels(compile_: Compile) -> Steps:
    """A causal language model from Hugging Face."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return with_labels(compile_(GPT2LMHeadModel(config)), (text(16, 64) for _ in range(4)))


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
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
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
    from torchvision.models.detection.rpn import AnchorGenerator
    from torchvision.ops import MultiScaleRoIAlign

    widths = (3, 16, 32, 32)
    layers = (nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()) for a, b in itertools.pairwise(widths))
    backbone = nn.Sequential(*layers)
    backbone.out_channels = 32  # type: ignore[assignment]
    model = compile_(
        FasterRCNN(
            backbone, num_classes=3, min_size=96, max_size=96, box_detections_per_img=10,
            rpn_anchor_generator=AnchorGenerator(((16, 32),), ((0.5, 1.0),)),
            box_roi_pool=MultiScaleRoIAlign(["0"], 4, 2),
            rpn_pre_nms_top_n_train=200, rpn_post_nms_top_n_train=50,
        )
    )  # fmt: skip

    def step(model: Any, images: Sequence[Tensor], targets: Sequence[dict[str, Tensor]]) -> Tensor:
        loss: Tensor = sum(model(images, targets).values())
        loss.backward()
        return loss

    optimizer = sgd(model)
    for _ in range(4):
        images = [torch.rand(3, 96, 96) for _ in range(2)]
        corner = torch.rand(3, 2) * 40
        boxes = torch.cat([corner, corner + 20 + torch.rand(3, 2) * 30], dim=1)
        targets = [{"boxes": boxes, "labels": torch.randint(1, 3, (3,))}] * 2
        yield partial(step, model, images, targets)
        update(optimizer)
