"""LoRA fine-tuning under a budget: with PEFT where it is installed, else by hand in a few lines."""

import importlib.util

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fxmem

TARGETS = ("q_proj", "v_proj")


class LoRALinear(nn.Module):
    """A frozen linear layer and a low-rank one that learns (Hu et al. 2021, arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(model: nn.Module) -> nn.Module:
    """`model` with its own weights frozen and adapters that learn."""
    if importlib.util.find_spec("peft"):
        from peft import LoraConfig, get_peft_model

        print("adapters by PEFT")
        return get_peft_model(model, LoraConfig(r=4, target_modules=list(TARGETS)))
    print("adapters by hand")
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in TARGETS and isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), last, LoRALinear(module))
    return model


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = adapted(LlamaForCausalLM(config))
    learning = [p for p in model.parameters() if p.requires_grad]
    step = fxmem.compile(model, budget=0.8)
    optimizer = torch.optim.AdamW(learning, lr=1e-2)
    tokens = torch.arange(128).view(4, 32) % 64
    losses = []
    for _ in range(4):
        loss = step(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    state = fxmem.step_of(step)
    print(repr(state.plan))
    print(f"{sum(p.numel() for p in learning)} numbers learn; losses {losses}")
    assert losses[-1] < losses[0]
    assert state.measured_peak_bytes <= state.budget_bytes


if __name__ == "__main__":
    main()
