"""Export of a GPT as transformers' GPT2LMHeadModel, where the architecture is GPT-2's.

Learned positions, LayerNorm before each branch, a GELU MLP, as many heads of keys as of queries, and no QK-norm,
softcap, sink or attention gate are needed. A GPT without biases gets biases of zero, and a head of its own is kept as
one (`tie_word_embeddings` is false): neither changes a logit.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from stabletrain.beside.export import byte_tokenizer
from stabletrain.beside.export.to_safetensors import save
from stabletrain.beside.export.trained import Format, Trained, Written, compare, tokens
from stabletrain.errors import ConfigError
from stabletrain.models.gpt import GPT, Block
from stabletrain.models.head import TiedHead
from stabletrain.models.layers import MLPS, NORMS, POSITIONS
from stabletrain.weights import gpt2

TOLERANCE = 1e-5
"""Largest difference of logits; both compute in fp32."""

GPT2_LAYERS = {"position": ("learned",), "norm": ("layernorm",), "mlp": ("gelu_tanh", "gelu")}
"""The layers of GPT-2 by key; GPT-2's own first."""


@dataclass(frozen=True)
class Transformers(Format):
    """`config.json`, `generation_config.json` and `model.safetensors`; for bytes, a tokenizer too."""

    def refuse(self, trained: Trained) -> None:
        """Raises ConfigError with every part of the GPT that GPT-2 does not have."""
        model = trained.model
        assert isinstance(model, GPT)
        parts = parts_of(model)
        wrong = [
            f"model.{key}={parts[key]} (GPT-2: {needed[0]})"
            for key, needed in GPT2_LAYERS.items()
            if parts[key] not in needed
        ]
        block = block_of(model)
        if block.attention.n_kv_head < block.attention.n_head:
            wrong.append(f"model.n_kv_head={block.attention.n_kv_head} (GPT-2: null)")
        others = {
            "qknorm": (block.attention.query_norm, "Identity", "none"),
            "softcap": (model.softcap, "NoSoftcap", "none"),
            "softmax": (block.attention.dot_product.sink, "NoneType", "plain"),
            "attention_gate": (block.attention.gate, "NoneType", "none"),
            "norm_placement": (block.norm_placement, "PreNorm", "pre"),
        }
        for key, (part, null, option) in others.items():
            if type(part).__name__ != null:
                wrong.append(f"{key}={trained.choices.get(key, type(part).__name__)} (GPT-2: {option})")
        if wrong:
            raise ConfigError(
                f"{trained.name} is not GPT-2, so transformers' GPT2LMHeadModel cannot compute it: {', '.join(wrong)}; "
                "use --to safetensors or --to onnx, or train with model=gpt2"
            )

    def write(self, trained: Trained, folder: Path) -> Written:
        """Writes the files; compares the logits if transformers is installed."""
        model = trained.model
        assert isinstance(model, GPT)
        sizes = sizes_of(model)
        config = gpt2.config_of(sizes, dropout=model.dropout.p)
        save(gpt2.to_transformers(model.state_dict()), folder / gpt2.ONE_FILE, trained.origin)
        write_json(folder / gpt2.CONFIG, config)
        write_json(folder / "generation_config.json", {"do_sample": True, "max_length": sizes["block_size"]})
        load = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "model = AutoModelForCausalLM.from_pretrained('{folder}')",
        ]
        if trained.tokenizer == "bytes":
            for name, content in byte_tokenizer.files(model.block_size).items():
                write_json(folder / name, content)
            load.append("tokenizer = AutoTokenizer.from_pretrained('{folder}')   # the ids of a text are its bytes")
            return Written(check(model, folder, sizes), load)
        return Written(check(model, folder, sizes), load, [tokenizer_note(trained.tokenizer)])


def check(model: GPT, folder: Path, sizes: gpt2.Sizes) -> str:
    """Compares the logits with those of transformers; returns the line for the user, empty without transformers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # libraries that transformers loads warn about themselves
    try:
        import transformers
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        other = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    except ImportError:
        return ""
    finally:
        logging.disable(before)
    inputs = tokens(int(sizes["vocab_size"]), min(int(sizes["block_size"]), 64))
    return compare(model, lambda x: other(x).logits, inputs, TOLERANCE, f"transformers {transformers.__version__}")


def parts_of(model: GPT) -> dict[str, str]:
    """Returns the names of the model's kinds of position, norm and MLP, as in its config."""
    tables: dict[str, tuple[dict[str, Any], nn.Module]] = {
        "position": (POSITIONS, model.position),
        "norm": (NORMS, block_of(model).attention_norm),
        "mlp": (MLPS, block_of(model).mlp),
    }
    return {
        key: next((name for name, kind in table.items() if type(module) is kind), type(module).__name__)
        for key, (table, module) in tables.items()
    }


def sizes_of(model: GPT) -> gpt2.Sizes:
    """Returns the arguments that make this model, as `gpt2.read` would."""
    block = block_of(model)
    eps = model.norm.eps
    assert isinstance(eps, float)
    return {
        "vocab_size": model.embedding.num_embeddings,
        "block_size": model.block_size,
        "n_layer": model.n_layer,
        "n_head": block.attention.n_head,
        "n_embd": model.embedding.embedding_dim,
        **parts_of(model),
        "norm_eps": eps,
        "bias": True,
        "tied_head": isinstance(model.head, TiedHead),
    }


def block_of(model: GPT) -> Block:
    """Returns the first block; all have the same layers."""
    block = model.blocks[0]
    assert isinstance(block, Block)
    return block


def tokenizer_note(name: str | None) -> str:
    """Returns a line that says how text becomes token ids, where no tokenizer is written."""
    if name == "gpt2":
        return "no tokenizer is written: the ids are GPT-2's, tokenizer = AutoTokenizer.from_pretrained('gpt2')"
    return f"no tokenizer is written: the ids are those of {f'tiktoken, {name}' if name else 'your own data'}"


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
