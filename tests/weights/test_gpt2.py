"""GPT-2's weights under transformers' names and ours: every bit is kept both ways, and the logits are transformers'."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from stabletrain.errors import ConfigError
from stabletrain.weights import gpt2
from tests.models.given import small
from tests.weights.given import GPT2_PARTS, gpt2_like, same

SMALL_CONFIG = {"model_type": "gpt2", "vocab_size": 29, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}


def folder_of(place, tensors, **changes):
    """Writes a folder as transformers does."""
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps({**SMALL_CONFIG, **changes}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, place / "model.safetensors")
    return place


@pytest.mark.beside
@pytest.mark.parametrize("changes", [{}, {"tied_head": False}, {"mlp": "gelu"}], ids=str)
def test_there_and_back_keeps_every_bit_and_every_size(changes, tmp_path):
    from stabletrain.beside.export.to_transformers import sizes_of

    model = gpt2_like(**changes)
    sizes = sizes_of(model)
    config = gpt2.config_of(sizes)
    found, tensors = gpt2.read(folder_of(tmp_path, gpt2.to_transformers(model.state_dict()), **config))
    assert same(tensors, model.state_dict())
    assert found == sizes
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    save_file(tensors, tmp_path / "again.safetensors")  # refuses tensors that share memory


def test_missing_biases_become_zeros_which_change_no_logit():
    model = small(**{**GPT2_PARTS, "bias": False})
    full = small(**GPT2_PARTS)
    named = gpt2.to_transformers(model.state_dict())
    full.load_state_dict(gpt2.from_transformers(named, tied=True, where="here"))
    tokens = torch.randint(29, (3, 16))
    assert torch.equal(full(tokens), model(tokens))


def test_openais_own_names_and_masks_are_read(tmp_path):
    model = gpt2_like()
    named = {
        name.removeprefix("transformer."): tensor for name, tensor in gpt2.to_transformers(model.state_dict()).items()
    }
    named |= {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16) for i in range(2)}
    named |= {"h.0.attn.masked_bias": torch.tensor(-1e4)}
    _, tensors = gpt2.read(folder_of(tmp_path, named))
    assert same(tensors, model.state_dict())


def test_shards_are_read_through_their_index(tmp_path):
    named = gpt2.to_transformers(gpt2_like().state_dict())
    folder = folder_of(tmp_path, named)
    (folder / "model.safetensors").unlink()
    names = sorted(named)
    where = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: named[name].contiguous() for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert same(gpt2.read(folder)[1], gpt2_like().state_dict())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors"):
        gpt2.read(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(ConfigError, match=r"\.\./x\.safetensors"):
        gpt2.read(folder)


def test_tensors_of_no_gpt2_keep_their_names(tmp_path):
    named = {**gpt2.to_transformers(gpt2_like().state_dict()), "score.weight": torch.ones(3, 32)}
    _, tensors = gpt2.read(folder_of(tmp_path, named))
    assert tensors.keys() - gpt2_like().state_dict().keys() == {"score.weight"}


def test_a_tied_head_must_be_the_embedding(tmp_path):
    named = gpt2.to_transformers(gpt2_like().state_dict())
    named["lm_head.weight"] = named["transformer.wte.weight"].clone()
    assert "head.weight" not in gpt2.read(folder_of(tmp_path, named))[1]
    named["lm_head.weight"] += 1
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from wte\.weight"):
        gpt2.read(folder_of(tmp_path, named))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu"}, r"activation_function=relu is not one of gelu_new"),
        ({"n_inner": 100}, r"n_inner=100 is not 4 n_embd = 128"),
        ({"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx=True is not False"),
        ({"model_type": "llama"}, r"model_type=llama is not gpt2"),
    ],
)
def test_another_architecture_is_refused_by_name(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        gpt2.read(folder_of(tmp_path, {}, **changes))


def test_a_folder_is_recognised_by_its_config(tmp_path):
    assert not gpt2.is_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert not gpt2.is_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        gpt2.read(tmp_path)
    assert not gpt2.is_folder(folder_of(tmp_path, {}, model_type="bert"))
    assert gpt2.is_folder(folder_of(tmp_path, {}))


def test_pickled_weights_are_refused_with_what_converts_them(tmp_path):
    folder = folder_of(tmp_path, {})
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="download the weights as safetensors"):
        gpt2.read(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"only pickled weights \(pytorch_model\.bin\).*convert them with python -c"):
        gpt2.read(folder)


@pytest.mark.slow
def test_the_command_that_converts_pickled_weights_works(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(**{k: v for k, v in SMALL_CONFIG.items() if k != "model_type"}))
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError) as refused:
        gpt2.read(tmp_path)
    code = str(refused.value).partition("python -c '")[2].removesuffix("'")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, capture_output=True)
    assert torch.equal(gpt2.read(tmp_path)[1]["embedding.weight"], theirs.transformer.wte.weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": False}, {"activation_function": "gelu"}, {"layer_norm_epsilon": 1e-3}],
    ids=str,
)
def test_transformers_weights_give_transformers_logits(changes, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {key: value for key, value in SMALL_CONFIG.items() if key != "model_type"}
    theirs = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **changes)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert not (tmp_path / "model.safetensors").exists(), "it is in shards"
    found, tensors = gpt2.read(tmp_path)
    ours = small(**found)
    ours.load_state_dict(tensors)
    tokens = torch.randint(29, (3, 16))
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-5
