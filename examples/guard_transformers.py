"""Trains a tiny GPT-2 with the Trainer of transformers and the guard, through a batch that holds an impossible weight.

pip install -e ".[transformers]" && python examples/guard_transformers.py
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from stabletrain.adapters.transformers import GuardCallback


class WeightedTrainer(Trainer):
    """Weights the loss of each text by its quality, which the data gives as a logarithm."""

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **_
    ) -> Tensor:
        logits = model(inputs["input_ids"]).logits[:, :-1]
        losses = cross_entropy(logits.transpose(1, 2), inputs["input_ids"][:, 1:], reduction="none").mean(1)
        return (losses * torch.exp(inputs["log_quality"])).mean()


def main() -> None:
    torch.manual_seed(0)
    texts = torch.arange(16).repeat(64, 1) + torch.randint(16, (64, 1))
    data = [{"input_ids": text, "log_quality": torch.tensor(0.0)} for text in texts]
    data[40]["log_quality"] = torch.tensor(100.0)  # exp(100) is Inf in fp32

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments("outputs/guard_transformers", num_train_epochs=2, per_device_train_batch_size=4,
                                  gradient_accumulation_steps=2, learning_rate=1e-3, save_strategy="no", report_to=[],
                                  remove_unused_columns=False, disable_tqdm=True, use_cpu=True)  # fmt: skip
    trainer = WeightedTrainer(model, arguments, train_dataset=data)
    callback = GuardCallback(trainer, folder="incidents")
    trainer.add_callback(callback)  # these two lines are to be added
    trainer.train()

    guard = callback.guard
    print(f"{guard.skipped} steps withheld of {trainer.state.global_step}: {guard.incidents[0].verdict}")


if __name__ == "__main__":
    main()
