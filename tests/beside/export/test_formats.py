"""Each format: what it refuses and why, and that the library it is for computes the same."""

import json

import numpy as np
import pytest
import torch
import torchvision
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from stabletrain.beside.export import to_onnx, to_safetensors, to_transformers
from stabletrain.beside.export.command import EXPORT_FILES
from stabletrain.beside.export.to_onnx import Onnx
from stabletrain.beside.export.to_safetensors import Safetensors
from stabletrain.beside.export.to_torchvision import Torchvision
from stabletrain.beside.export.to_transformers import Transformers
from stabletrain.beside.export.trained import compare
from stabletrain.errors import ConfigError, StabletrainError
from stabletrain.models.nf_resnet import NFResNet
from stabletrain.models.resnet import CifarResNet, TorchvisionResNet
from stabletrain.stability.attention_gate import SigmoidGate
from stabletrain.stability.norm_placement import PostNorm, ReorderedNorm
from stabletrain.stability.qknorm import LayerNormQK
from stabletrain.stability.softcap import Gemma2Softcap
from stabletrain.stability.softmax import SinkSoftmax
from stabletrain.weights import gpt2
from tests.models.given import small
from tests.weights.given import GPT2_PARTS, gpt2_like, same, trained


class Tied(nn.Module):
    """A user's model whose state names one tensor twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


class Pair(nn.Module):
    """A user's model on token ids that returns the logits and something else."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids):
        x = self.table(ids)
        return self.out(x), x


class Branching(nn.Module):
    """A user's model that no exporter can trace."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(x) if x.sum().item() > 0 else self.out(-x)


class Extra(nn.Linear):
    """A user's layer with a state that is no tensor."""

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        pass


def moved_statistics(model):
    """Sets BatchNorm's statistics to what no new model has."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
    return model


def write(form, model, place, **given):
    """Writes the model, as the command does."""
    place.mkdir(exist_ok=True)
    form.refuse(trained(model, **given))
    return form.write(trained(model, **given), place)


def test_safetensors_hold_every_bit_of_any_model(tmp_path):
    for number, model in enumerate((small(), CifarResNet(depth=8, num_classes=3, in_channels=1), Tied())):
        written = write(Safetensors(), model, tmp_path / str(number))
        assert same(load_file(tmp_path / str(number) / "model.safetensors"), dict(model.state_dict()))
        assert "same bits" in written.checked
        with safe_open(tmp_path / str(number) / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt", "run": "abc", "step": "7"}


def test_safetensors_are_read_back_before_they_count(tmp_path, monkeypatch):
    def rounded(tensors, file, origin):
        to_safetensors.save_file({name: value.half().float() for name, value in tensors.items()}, file)

    monkeypatch.setattr(to_safetensors, "save", rounded)
    with pytest.raises(StabletrainError, match="differs after reading it back"):
        write(Safetensors(), small(), tmp_path / "out")


def test_a_state_that_is_no_tensor_is_refused():
    model = nn.Sequential(Extra(2, 2))
    with pytest.raises(ConfigError, match=r"its state 0\._extra_state is a dict, and safetensors hold tensors only"):
        Safetensors().refuse(trained(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": "rope"}, r"model\.position=rope \(GPT-2: learned\)"),
        ({"norm": "rmsnorm"}, r"model\.norm=rmsnorm \(GPT-2: layernorm\)"),
        ({"mlp": "swiglu"}, r"model\.mlp=swiglu \(GPT-2: gelu_tanh\)"),
        ({"n_kv_head": 2}, r"model\.n_kv_head=2 \(GPT-2: null\)"),
        ({"qknorm": LayerNormQK(1e-6)}, r"qknorm=layernorm \(GPT-2: none\)"),
        ({"softcap": Gemma2Softcap(50.0, 30.0)}, r"softcap=gemma2 \(GPT-2: none\)"),
        ({"softmax": SinkSoftmax()}, r"softmax=sink \(GPT-2: plain\)"),
        ({"attention_gate": SigmoidGate("head")}, r"attention_gate=sigmoid \(GPT-2: none\)"),
        ({"norm_placement": ReorderedNorm()}, r"norm_placement=reordered \(GPT-2: pre\)"),
        ({"norm_placement": PostNorm()}, r"norm_placement=PostNorm \(GPT-2: pre\)"),
    ],
    ids=str,
)
def test_what_gpt2_does_not_have_is_refused_by_name(changes, message):
    model = small(**{**GPT2_PARTS, **changes})
    choices = {"model": "gpt2", "qknorm": "layernorm", "softcap": "gemma2"}
    choices |= {"softmax": "sink", "attention_gate": "sigmoid"}
    choices |= {"norm_placement": "reordered"} if changes.get("norm_placement") == ReorderedNorm() else {}
    with pytest.raises(ConfigError, match=rf"model=gpt2 is not GPT-2.*: {message}; use --to safetensors or --to onnx"):
        Transformers().refuse(trained(model, choices=choices))


def test_all_that_gpt2_does_not_have_is_named_at_once():
    with pytest.raises(ConfigError, match=r"position=rope.*norm=rmsnorm.*mlp=swiglu"):
        Transformers().refuse(trained(small(norm="rmsnorm", mlp="swiglu")))


def test_a_gpt_is_read_back_bit_for_bit_from_its_transformers_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(to_transformers, "check", lambda *_: "")  # transformers is slow to import
    model = gpt2_like(dropout=0.25)
    write(Transformers(), model, tmp_path / "hf")
    sizes, tensors = gpt2.read(tmp_path / "hf")
    assert same(tensors, dict(model.state_dict()))
    again = small(**sizes)
    again.load_state_dict(tensors)
    tokens = torch.randint(29, (2, 16))
    assert torch.equal(again(tokens), model(tokens))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert [config[f"{where}_pdrop"] for where in ("attn", "embd", "resid")] == [0.25] * 3


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2", "cl100k_base", None])
def test_only_bytes_have_a_tokenizer_to_write(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(to_transformers, "check", lambda *_: "")
    written = write(Transformers(), gpt2_like(), tmp_path, tokenizer=tokenizer)
    assert (tmp_path / "tokenizer.json").exists() == (tokenizer == "bytes")
    assert "".join(written.notes).startswith("" if tokenizer == "bytes" else "no tokenizer is written")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_head": False}, {"bias": False}, {"mlp": "gelu"}, {"norm_eps": 1e-3, "block_size": 5}],
    ids=str,
)
def test_transformers_computes_the_same_logits(changes, tmp_path):
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    model = gpt2_like(**changes)
    written = write(Transformers(), model, tmp_path)
    assert written.checked.startswith("transformers ")
    theirs, info = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), "no tensor is missing, none is left over"
    tokens = torch.randint(29, (3, model.block_size))
    with torch.no_grad():
        assert (theirs.eval()(tokens).logits - model(tokens)).abs().max() < 1e-5
        auto = AutoModelForCausalLM.from_pretrained(tmp_path)
        greedy = auto.generate(tokens[:, :1], do_sample=False, max_length=5)
    assert greedy.shape == (3, 5)


@pytest.mark.slow
def test_an_export_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    config_of = gpt2.config_of
    monkeypatch.setattr(gpt2, "config_of", lambda *a, **k: {**config_of(*a, **k), "activation_function": "relu"})
    with pytest.raises(StabletrainError, match="the exported model differs: transformers .* nothing was written"):
        write(Transformers(), gpt2_like(), tmp_path)


def test_a_difference_is_measured_against_the_outputs():
    model, inputs = nn.Linear(4, 4), torch.randn(2, 4)
    assert "the largest difference is 0" in compare(model, model, inputs, 1e-5, "a library")
    for wrong in (lambda x: model(x) + 1e-3, lambda x: model(x) * torch.nan):
        with pytest.raises(StabletrainError, match="a library computes outputs"):
            compare(model, wrong, inputs, 1e-5, "a library")


@pytest.mark.parametrize("depth", [18, pytest.param(50, marks=pytest.mark.slow)])
def test_torchvision_takes_the_state_of_its_resnets(depth, tmp_path):
    torch.manual_seed(1)
    model = moved_statistics(TorchvisionResNet(depth=depth, num_classes=7, in_channels=3, stem="large")).eval()
    written = write(Torchvision(), model, tmp_path)
    assert f"model = torchvision.models.resnet{depth}(num_classes=7)" in written.load
    theirs = getattr(torchvision.models, f"resnet{depth}")(num_classes=7).eval()
    theirs.load_state_dict(load_file(tmp_path / "model.safetensors"))
    images = torch.randn(2, 3, 48, 40)
    with torch.no_grad():
        ours = model(images)
        assert (theirs(images) - ours).abs().max() <= 1e-5 * ours.abs().max().clamp(min=1)
    again = TorchvisionResNet(depth=depth, num_classes=7, in_channels=3, stem="large")
    again.load_state_dict(theirs.state_dict())
    assert same(dict(again.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stem": "small", "in_channels": 3}, r"model\.stem=small begins with a 3 x 3 convolution"),
        ({"stem": "large", "in_channels": 1}, r"model\.in_channels=1, but torchvision's ResNet reads 3"),
    ],
    ids=str,
)
def test_another_first_layer_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=rf"model=resnet18: {message}"):
        Torchvision().refuse(
            trained(TorchvisionResNet(depth=18, num_classes=2, **changes), choices={"model": "resnet18"})
        )


def logits_of(place, inputs):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(place / "model.onnx"), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"inputs": inputs.numpy()})[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        lambda: gpt2_like(),
        lambda: small(
            norm="rmsnorm",
            mlp="swiglu",
            qknorm=LayerNormQK(1e-6),
            softmax=SinkSoftmax(),
            attention_gate=SigmoidGate("head"),
            n_kv_head=2,
        ),
    ],
    ids=["gpt2", "rope and the options"],
)
def test_onnxruntime_computes_a_gpt_at_any_batch_and_length(model, tmp_path):
    model = model()
    written = write(Onnx(), model, tmp_path)
    assert written.load[-1].endswith("# inputs: int64 [batch, time]")
    assert not written.notes
    for batch, time in ((1, 1), (2, 16), (5, 7)):
        tokens = torch.randint(29, (batch, time))
        with torch.no_grad():
            assert (logits_of(tmp_path, tokens) - model(tokens)).abs().max() < 1e-4
    assert str(tmp_path).encode() not in (tmp_path / "model.onnx").read_bytes()
    assert b"stabletrain/models" not in (tmp_path / "model.onnx").read_bytes(), "no paths of this machine"


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        lambda: CifarResNet(depth=8, num_classes=3, in_channels=1),
        lambda: TorchvisionResNet(depth=18, num_classes=3, in_channels=3, stem="large"),
        lambda: NFResNet(depth=8, num_classes=3, in_channels=3, alpha=0.2, skipinit=False),
    ],
    ids=["cifar", "resnet18", "nf"],
)
def test_onnxruntime_computes_a_resnet_at_any_batch_and_size(model, tmp_path):
    model = moved_statistics(model()).eval()
    write(Onnx(), model, tmp_path)
    channels = next(layer.in_channels for layer in model.modules() if isinstance(layer, nn.Conv2d))
    for batch, height, width in ((1, 8, 8), (3, 32, 40), (2, 224, 224)):
        images = torch.randn(batch, channels, height, width)
        with torch.no_grad():
            ours = model(images)
            assert (logits_of(tmp_path, images) - ours).abs().max() <= 1e-4 * ours.abs().max().clamp(min=1)


@pytest.mark.slow
def test_a_users_model_is_traced_on_its_own_data(tmp_path):
    model = Pair()
    write(Onnx(), model, tmp_path, samples=torch.randint(11, (2, 6)))
    ids = torch.randint(11, (4, 3))
    with torch.no_grad():
        assert np.allclose(logits_of(tmp_path, ids), model(ids)[0], atol=1e-4)


@pytest.mark.slow
def test_large_weights_lie_beside_the_model_and_move_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(to_onnx, "LARGEST_FILE", 0)
    model, tokens = small(), torch.randint(29, (2, 5))
    write(Onnx(), model, tmp_path / "hidden")
    (tmp_path / "hidden").rename(tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"model.onnx", "model.onnx.data"} <= EXPORT_FILES
    with torch.no_grad():
        assert (logits_of(tmp_path / "out", tokens) - model(tokens)).abs().max() < 1e-4


@pytest.mark.slow
def test_a_model_that_cannot_be_traced_is_one_error(tmp_path):
    with pytest.raises(StabletrainError, match=r"torch\.export cannot trace the model: .*use --to safetensors"):
        write(Onnx(), Branching(), tmp_path, samples=torch.randn(2, 4))


def test_a_missing_package_is_one_line_with_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    monkeypatch.setitem(__import__("sys").modules, "onnx", nn)
    with pytest.raises(ConfigError, match=r"--to onnx needs onnxscript .*: pip install 'stabletrain\[export\]'"):
        Onnx().refuse(trained(small()))
