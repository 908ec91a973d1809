"""Transformers' Trainer: compile the model in place, then hand it over. Needs `pip install 'fxmem[hf]' accelerate`."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import fxmem


class Tokens(torch.utils.data.Dataset):
    """Made up: rows of consecutive numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.arange(index, index + 32) % 64
        return {"input_ids": row, "labels": row}


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.compile(backend="fxmem", options={"budget": 0.8})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, num_train_epochs=1, report_to=[], use_cpu=True, save_strategy="no",
            disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=Tokens()).train()
    step = fxmem.step_of(model)
    print(repr(step.plan))
    assert step.measured_peak_bytes <= step.budget_bytes


if __name__ == "__main__":
    main()
