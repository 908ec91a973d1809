"""Trainers and adapters around a compiled model, and models compiled in place under them: the same losses, planned."""

import copy

import pytest
import torch
from torch import nn

import fxmem
from tests.models import Blocks, blocks, gradients

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainers themselves
OPTIONS = {"budget": 0.95, "planner": "sqrt"}


def compiled(module, in_place):
    if in_place:
        module.compile(backend="fxmem", options=OPTIONS)
    return module if in_place else fxmem.compile(module, **OPTIONS)


def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


class Tokens(torch.utils.data.Dataset):
    """With a column that the model does not take."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 16) % 64
        return {"input_ids": tokens, "labels": tokens, "text": "dropped"}


def trained(model, folder):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, num_train_epochs=1, report_to=[], use_cpu=True, save_strategy="epoch",
        logging_steps=1, disable_tqdm=True, seed=1,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Tokens())
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_transformers_trainer(in_place, tmp_path):
    model = gpt2()
    expected = trained(copy.deepcopy(model), tmp_path / "plain")
    if in_place:
        model.compile(backend="fxmem")
    step = model if in_place else fxmem.compile(model)
    assert isinstance(step, type(model))
    assert trained(step, tmp_path / "planned") == expected
    assert fxmem.step_of(step).plans
    (checkpoint,) = (tmp_path / "planned").glob("checkpoint-*")
    loaded = type(model).from_pretrained(checkpoint)
    assert loaded.config.architectures == ["GPT2LMHeadModel"]
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("adapters_first", [False, True])
def test_peft_before_and_after(num_steps, adapters_first):
    peft = pytest.importorskip("peft")

    def adapted(model):
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights=False))

    tokens = torch.arange(32).view(2, 16)
    expected = adapted(gpt2())
    expected(input_ids=tokens, labels=tokens).loss.backward()
    model = gpt2()
    step = fxmem.compile(adapted(model) if adapters_first else model)
    for _ in range(num_steps):
        step(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()
    run = step if adapters_first else adapted(step)
    run(input_ids=tokens, labels=tokens).loss.backward()
    found = gradients(run)
    assert len(found) == 4
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(expected), strict=True))
    assert fxmem.step_of(step).plans
    assert isinstance(run, peft.PeftModel)


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision, in_place):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
    module, args = blocks()
    reference = copy.deepcopy(module)
    step = compiled(module, in_place)
    run, optimizer = accelerator.prepare(step, torch.optim.SGD(module.parameters(), 0.1))
    accelerator.backward(run(*args))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        reference(*args).backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(module), gradients(reference), strict=True))
    optimizer.step()
    plan = fxmem.step_of(run).plan
    assert plan.peak_bytes <= plan.budget_bytes
    plain = accelerator.unwrap_model(run, keep_fp32_wrapper=False)
    plain(*args).backward()
    assert fxmem.step_of(plain).plan.budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_lightning(in_place):
    lightning = pytest.importorskip("pytorch_lightning")

    class Training(lightning.LightningModule):
        def __init__(self, is_planned):
            super().__init__()
            torch.manual_seed(0)
            self.model = Blocks()
            if is_planned:
                self.model = compiled(self.model, in_place)

        def training_step(self, batch, index):
            return self.model(*batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(512, 32), torch.randn(512, 32))
    trained = []
    for is_planned in (False, True):
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trained.append(Training(is_planned))
        trainer.fit(trained[-1], torch.utils.data.DataLoader(data, batch_size=128))
    plain, planned = trained
    assert list(plain.state_dict()) == list(planned.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), planned.parameters(), strict=True))
    assert fxmem.step_of(planned.model).plan.budget_bytes


def test_as_a_part_of_another_module():
    module, args = blocks()
    reference = copy.deepcopy(module)
    whole = nn.ModuleDict({"body": fxmem.compile(module, **OPTIONS)}).double()
    args = tuple(x.double() for x in args)
    whole["body"](*args).backward()
    reference.double()(*args).backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(whole), gradients(reference), strict=True))
    assert next(iter(whole.state_dict())).startswith("body.")
