"""Trains a small GPT from Python, loads it, and generates text with it: half a minute on two CPU cores.

    python examples/train_and_load.py [group=option ...] [key=value ...]

In a notebook, call `stabletrain.train` in the same way. It neither reads the command line nor exits.
"""

import sys

import torch

import stabletrain

# a smaller model than the default, so that the example is quick; what is typed comes last, and wins
small = ["model.n_layer=2", "model.n_embd=64", "data.block_size=64", "steps=300", "eval_batches=10", "wandb=disabled"]
result = stabletrain.train([*small, *sys.argv[1:]])
if result.status != "finished":
    sys.exit(f"{result.status}: {result.reason}")
print(f"validation loss {result.metrics['val/loss']:.3f} nats/byte, run folder {result.folder}")

# a plain nn.Module in eval mode: its inputs are bytes here, its outputs the logits of each next byte
model = stabletrain.load(result.folder)
text = torch.tensor([list(b"def main(")])
with torch.no_grad():
    for _ in range(40):
        logits = model(text[:, -64:])[:, -1]
        text = torch.cat([text, logits.argmax(-1, keepdim=True)], dim=1)
print(bytes(text[0].tolist()).decode(errors="replace"))

# every run below this folder, one row each
runs = stabletrain.compare(result.folder.parent)
print(runs[["status", "steps", "val_loss", "seconds"]].to_string(index=False))
