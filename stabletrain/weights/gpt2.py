"""GPT-2's weights under the names of transformers, and under the names of this package's GPT.

| GPT | transformers | |
|---|---|---|
| `embedding.weight` | `wte.weight` | |
| `position.embedding.weight` | `wpe.weight` | |
| `blocks.<i>.attention_norm` | `h.<i>.ln_1` | |
| `blocks.<i>.attention.{query, key, value}` | `h.<i>.attn.c_attn` | the three beside each other, transposed |
| `blocks.<i>.attention.out` | `h.<i>.attn.c_proj` | transposed |
| `blocks.<i>.mlp_norm` | `h.<i>.ln_2` | |
| `blocks.<i>.mlp.{up, down}` | `h.<i>.mlp.{c_fc, c_proj}` | transposed |
| `norm` | `ln_f` | |
| `head.weight` | `lm_head.weight` | none if the head is tied |

transformers stores the weight of a linear layer of GPT-2 as `[in, out]` (its `Conv1D`), PyTorch as `[out, in]`. In a
folder, names may begin with `transformer.`, or not, as in OpenAI's own. Values are moved, never computed with, so both
ways keep every bit.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.stored.json_files import parse, read_file
from stabletrain.weights import files

CONFIG, ONE_FILE = files.CONFIG, files.ONE_FILE

GELUS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
}
"""transformers' name of an activation function, and this GPT's name of the MLP that computes it."""

SAME_LAYOUT = {
    "embedding": "wte",
    "position.embedding": "wpe",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "norm": "ln_f",
}
"""Modules whose tensors are the same in both: this GPT's name, and transformers'."""

TRANSPOSED = {"attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
"""Linear layers in a block: this GPT's name, and transformers'."""

FUSED, QUERY_KEY_VALUE = "attn.c_attn", ("attention.query", "attention.key", "attention.value")
"""The layer that transformers has in place of three, and the three in order."""

MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""Buffers of older versions of transformers: the causal mask, which is no weight."""

BLOCK, OUR_BLOCK = re.compile(r"h\.(\d+)\.(.+)\.(weight|bias)"), re.compile(r"blocks\.(\d+)\.(.+)")

Sizes = dict[str, int | float | str]
"""Arguments of `models.gpt.GPT` by name: its sizes and its choice of layers."""


def is_folder(folder: Path) -> bool:
    """Returns whether `folder` holds a GPT-2 of transformers: a `config.json` with `model_type` gpt2."""
    return files.config_in(folder).get("model_type") == "gpt2"


def read(folder: Path) -> tuple[Sizes, dict[str, Tensor]]:
    """Reads a folder of transformers, without importing transformers and without unpickling anything.

    Args:
        folder: `config.json` and `model.safetensors`, or its shards with `model.safetensors.index.json`.

    Returns:
        The arguments of `models.gpt.GPT` that make this model (all but `dropout`, which only training needs), and its
        parameters by this GPT's names: on the CPU, contiguous, in the dtype in which they are stored. A tensor that no
        GPT-2 has, such as a classifier's, keeps its name.

    Raises:
        ConfigError: a file is missing or cannot be read, the weights are pickled, or `config.json` asks for an
            architecture that this GPT does not have.
    """
    try:
        config = parse(read_file(folder / CONFIG))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / CONFIG} cannot be read ({error}): name a folder of transformers") from error
    sizes = sizes_of(config, str(folder / CONFIG))
    tensors = from_transformers(read_tensors(folder), tied=bool(sizes["tied_head"]), where=str(folder))
    return sizes, tensors


def sizes_of(config: Mapping[str, Any], where: str) -> Sizes:
    """Returns the arguments of `models.gpt.GPT` for a `config.json`; defaults are those of transformers' GPT2Config.

    Raises:
        ConfigError: a value asks for what this GPT does not have; names the key, its value and the bound.
    """
    n_embd, gelu = config.get("n_embd", 768), config.get("activation_function", "gelu_new")
    if config.get("model_type") != "gpt2":
        raise ConfigError(f"{where}: model_type={config.get('model_type')} is not gpt2")
    if gelu not in GELUS:
        raise ConfigError(f"{where}: activation_function={gelu} is not one of {', '.join(GELUS)}, which this GPT has")
    if config.get("n_inner") not in (None, 4 * n_embd):
        raise ConfigError(f"{where}: n_inner={config['n_inner']} is not 4 n_embd = {4 * n_embd}, which this GPT has")
    for key, needed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config.get(key, needed) != needed:
            raise ConfigError(f"{where}: {key}={config[key]} is not {needed}, as in GPT-2 and this GPT")
    return {
        "vocab_size": config.get("vocab_size", 50257),
        "block_size": config.get("n_positions", config.get("n_ctx", 1024)),
        "n_layer": config.get("n_layer", 12),
        "n_head": config.get("n_head", 12),
        "n_embd": n_embd,
        "position": "learned",
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "mlp": GELUS[gelu],
        "bias": True,
        "tied_head": config.get("tie_word_embeddings", True),
    }


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of a folder's safetensors by their names there.

    Raises:
        ConfigError: there are none, or a file is missing or damaged.
    """
    if names := files.files_of(folder):
        return files.read(folder, names)
    if pickled := files.pickled_in(folder):
        raise ConfigError(
            f"{folder} holds only pickled weights ({pickled[0]}), which are not read, because unpickling can run any "
            f"code: convert them with python -c 'from transformers import GPT2LMHeadModel as M; "
            f'd = "{folder}"; M.from_pretrained(d).save_pretrained(d)\''
        )
    raise ConfigError(f"{folder} holds no .safetensors file: download the weights as safetensors")


def from_transformers(tensors: Mapping[str, Tensor], *, tied: bool, where: str) -> dict[str, Tensor]:
    """Returns transformers' tensors under this GPT's names.

    Args:
        tensors: by transformers' names, with or without `transformer.` before them.
        tied: whether the head is the embedding; then `lm_head.weight`, if present, must be equal to `wte.weight`.
        where: name of their source in errors.

    Raises:
        ConfigError: a tensor cannot be split, or a tied head differs from the embedding.
    """
    named = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    head = named.get("lm_head.weight")
    if tied and head is not None:
        if "wte.weight" in named and not torch.equal(head, named["wte.weight"]):
            raise ConfigError(
                f"{where}: lm_head.weight differs from wte.weight, but tie_word_embeddings is true: "
                f'set "tie_word_embeddings": false in its {CONFIG}'
            )
        named.setdefault("wte.weight", named.pop("lm_head.weight"))
    back = {theirs: ours for ours, theirs in SAME_LAYOUT.items()}
    linear = {theirs: ours for ours, theirs in TRANSPOSED.items()}
    found: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if MASK.fullmatch(name):
            continue
        module, _, kind = name.rpartition(".")
        block = BLOCK.fullmatch(name)
        inner, ours = (block[2], f"blocks.{block[1]}.") if block else (module, "")
        if tensor.ndim > 2:
            found[name] = tensor  # no GPT-2 has it
        elif name == "lm_head.weight":
            found["head.weight"] = tensor
        elif block and inner == FUSED:
            if tensor.shape[-1] % len(QUERY_KEY_VALUE):
                raise ConfigError(f"{where}: {name} of shape {list(tensor.shape)} is not query, key and value")
            for part, piece in zip(QUERY_KEY_VALUE, tensor.chunk(len(QUERY_KEY_VALUE), dim=-1), strict=True):
                found[f"{ours}{part}.{kind}"] = piece.t().clone(memory_format=torch.contiguous_format)
        elif block and inner in linear:
            found[f"{ours}{linear[inner]}.{kind}"] = tensor.t().contiguous()
        else:
            found[f"{ours}{back[inner]}.{kind}" if inner in back else name] = tensor
    return found


def to_transformers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns this GPT's tensors under the names of transformers' GPT2LMHeadModel; a missing bias becomes zeros.

    Args:
        tensors: the parameters by this GPT's names.

    Raises:
        KeyError: a tensor has no name there, or one of query, key and value is missing.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        inside = OUR_BLOCK.fullmatch(module)
        block, inner = inside.groups() if inside else ("", module)
        theirs = f"transformer.h.{block}." if inside else "transformer."
        if name == "head.weight":
            found["lm_head.weight"] = tensor
        elif not inside or inner in SAME_LAYOUT:
            found[f"{theirs}{SAME_LAYOUT[inner]}.{kind}"] = tensor
        elif inner in TRANSPOSED:
            found[f"{theirs}{TRANSPOSED[inner]}.{kind}"] = tensor.t().contiguous()
        elif inner == QUERY_KEY_VALUE[0]:
            parts = [tensors[f"blocks.{block}.{part}.{kind}"] for part in QUERY_KEY_VALUE]
            found[f"{theirs}{FUSED}.{kind}"] = torch.cat([part.t() for part in parts], dim=-1).contiguous()
        elif inner not in QUERY_KEY_VALUE:
            raise KeyError(name)
    for name in [name for name in found if name.endswith(".weight")]:
        module = name.removesuffix(".weight")
        if module.endswith(("wte", "wpe", "lm_head")):
            continue
        width = found[name].shape[-1]  # of a linear layer, stored as [in, out], and of a LayerNorm
        found.setdefault(f"{module}.bias", found[name].new_zeros(width))
    return found


def config_of(sizes: Mapping[str, Any], dropout: float = 0.0) -> dict[str, Any]:
    """Returns the `config.json` of transformers for arguments of `models.gpt.GPT` that `read` could return."""
    gelu = next(theirs for theirs, ours in GELUS.items() if ours == sizes["mlp"])
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": sizes["vocab_size"],
        "n_positions": sizes["block_size"],
        "n_layer": sizes["n_layer"],
        "n_head": sizes["n_head"],
        "n_embd": sizes["n_embd"],
        "activation_function": gelu,
        "layer_norm_epsilon": sizes["norm_eps"],
        "tie_word_embeddings": sizes["tied_head"],
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": True,
    }
