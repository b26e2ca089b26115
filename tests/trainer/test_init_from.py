"""`init_from`: a new run begins with the weights of another, and with nothing else of it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torchvision.models import resnet18

import stabletrain
from stabletrain.checkpoint.folder import find
from stabletrain.cli.replay import replay_incident
from stabletrain.errors import ConfigError
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from tests.once import once
from tests.reliability.ends import metrics
from tests.runs import TINY_GPT, TINY_RESNET, composed

QUIET = ["report=false", "monitors=none", "forensics=off", "log_every=1", "warmup=none", "schedule=constant"]
SMALL = [*TINY_GPT, *QUIET, "steps=4", "checkpoint.every=2", "checkpoint.keep=9", "eval_every=4"]


def trained(folder, *overrides):
    return stabletrain.train([*overrides, f"hydra.run.dir={folder}"])


def weights(folder):
    return find(Path(folder)).load_model()


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("init_from")


@pytest.fixture(scope="module")
def text(place):
    (place / "text.txt").write_text("".join(f"line {i} of some text, {i * i}\n" for i in range(400)))
    return ["data=text", f"data.path={place / 'text.txt'}"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run on the standard library."""
    return once(tmp_path_factory, "init_from", lambda folder: trained(folder, *SMALL))


@pytest.fixture
def started(tmp_path):
    """Builds a run, without a step; closes all at the end."""
    runs = []

    def start(*overrides):
        with composed(*overrides) as cfg:
            run = build(cfg, tmp_path / f"built{len(runs)}")
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.data.batches.close()
        run.output.tracker.close(0)
        run.output.folder.abandon("the test is over")


def opening(capsys):
    return capsys.readouterr().out


def test_a_run_on_other_data_begins_with_the_weights_and_with_a_fresh_state(started, source, text, capsys):
    run = started(*SMALL, *text, f"init_from={source}")
    last = find(source)
    assert equal(run.state.model.state_dict(), last.load_model())
    assert (run.state.step, run.state.executed_steps, run.history.updates) == (0, 0, 0)
    moments = [value for state in run.state.optimizer.state.values() for value in state.values()]
    assert all(not torch.as_tensor(value).any() for value in moments)
    assert run.tools.guard.state_dict() == started(*SMALL, *text).tools.guard.state_dict()
    assert f"weights from {last.path} (val loss {last.val_loss:.3f}): 19 of 19 tensors" in opening(capsys)


def test_one_checkpoint_may_be_named_and_the_record_says_which(started, source):
    first = source / "checkpoints" / "step-00000002"
    run = started(*SMALL, f"init_from={first}")
    assert equal(run.state.model.state_dict(), find(first).load_model())
    assert not equal(find(first).load_model(), weights(source))
    record = run.output.folder.read()["init_from"]
    manifest = json.loads((first / "manifest.json").read_text())
    assert record == {
        "path": str(first),
        "kind": "checkpoint",
        "step": 2,
        "sha256": {"model.safetensors": manifest["files"]["model.safetensors"]["sha256"]},
    }
    assert "init_from" not in started(*SMALL).output.folder.read()


def test_a_misfit_is_one_error_that_says_what_to_type(started, source, text):
    wide = ["model.n_embd=32", "model.n_head=4", "model.bias=true"]
    with pytest.raises(ConfigError) as error:
        started(*SMALL, *wide, f"init_from={source}")
    message = str(error.value)
    assert message.startswith(f"init_from={source}: the weights of {find(source).path} (val loss ")
    assert ") do not fit model=gpt_nano: 17 missing from the source: blocks.0.attention_norm.bias, " in message
    assert (
        " and 14 more; 19 of another shape or type: embedding.weight [256, 16] in the source, [256, 32] in the"
        in message
    )
    assert message.endswith(
        "n_head is 2 in the source and 4 here; type model.n_head=2 model.n_embd=16 model.bias=false to build the "
        "source's model, or init_strict=false to load what fits"
    )
    words = message.partition("; type ")[2].partition(" to build")[0].split()
    run = started(*SMALL, *wide, *words, f"init_from={source}")
    assert equal(run.state.model.state_dict(), weights(source)), "what it says to type works"


def test_weights_that_fit_by_shape_but_would_mean_something_else_are_refused(started, source, capsys):
    with pytest.raises(
        ConfigError, match=r"fit model=gpt_nano: n_head is 2 in the source and 4 here; type model.n_head=2 "
    ):
        started(*SMALL, "model.n_head=4", f"init_from={source}")
    started(*SMALL, "model.n_head=4", f"init_from={source}", "init_strict=false")
    assert "the source's model had other settings: n_head=2, here 4" in opening(capsys)
    started(*SMALL, "model.norm_eps=1e-5", "model.dropout=0.1", "softcap=gemma2", f"init_from={source}")
    assert "the source's model had other settings: norm_eps=1e-06, here 1e-05; softcap\n" in opening(capsys)
    with pytest.raises(ConfigError, match="type qknorm=none to build the source's model"):
        started(*SMALL, "qknorm=rmsnorm", f"init_from={source}")
    with pytest.raises(ConfigError, match="type softmax=plain attention_gate=none to build the source's model"):
        started(*SMALL, "softmax=sink", "attention_gate=sigmoid", f"init_from={source}")
    with pytest.raises(
        ConfigError, match="another norm_placement; type norm_placement=pre to build the source's model"
    ):
        started(*SMALL, "norm_placement=reordered", f"init_from={source}")


def test_an_exported_folder_says_its_sizes_too(started, source, tmp_path):
    model = {"_target_": "stabletrain.models.gpt.GPT", "n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 256}
    save_file(weights(source), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"format": "stabletrain", "model": model}))
    with pytest.raises(ConfigError, match=r"n_head is 2 in the source and 4 here; type model.n_head=2 to build"):
        started(*SMALL, "model.n_head=4", f"init_from={tmp_path}")
    run = started(*SMALL, f"init_from={tmp_path}")
    assert equal(run.state.model.state_dict(), weights(source))


def test_without_strict_what_fits_is_loaded_and_the_rest_keeps_its_init(started, source, capsys):
    deeper = [*SMALL, "model.n_layer=3", "model.block_size=64"]
    run, fresh = started(*deeper, f"init_from={source}", "init_strict=false"), started(*deeper)
    saved, own = weights(source), fresh.state.model.state_dict()
    for name, value in run.state.model.state_dict().items():
        assert torch.equal(value, own[name] if name.startswith("blocks.2.") else saved[name]), name
    shown = opening(capsys)
    assert "19 of 27 tensors; 8 missing from the source: blocks.2.attention_norm.weight, " in shown
    assert " and 5 more; what is not loaded keeps its init" in shown


@pytest.mark.slow
def test_a_source_of_which_nothing_fits_is_refused_even_then(started, source):
    with pytest.raises(ConfigError, match=r"no tensor of .* fits model=resnet20"):
        started(*TINY_RESNET, *QUIET, f"init_from={source}", "init_strict=false")
    with pytest.raises(
        ConfigError, match=r"do not fit model=resnet20: .*; type model=gpt_nano to build the source's model"
    ):
        started(*TINY_RESNET, *QUIET, f"init_from={source}")


def test_weights_that_are_not_finite_are_refused(started, tmp_path):
    run = started(*SMALL)
    state = {name: value.clone() for name, value in run.state.model.state_dict().items()}
    state["norm.weight"][3] = torch.inf
    (tmp_path / "bad").mkdir()
    save_file(state, tmp_path / "bad" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"init_from=.*bad: 1 of its tensors are not finite: norm.weight"):
        started(*SMALL, f"init_from={tmp_path / 'bad'}")


@pytest.mark.slow
def test_a_foreign_resnet_comes_with_its_statistics_and_a_new_head(started, tmp_path, capsys):
    torchvisions = resnet18(num_classes=7)
    for name, buffer in torchvisions.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 2.0)
    compiled = {f"_orig_mod.{name}": value.contiguous() for name, value in torchvisions.state_dict().items()}
    (tmp_path / "net").mkdir()
    save_file(compiled, tmp_path / "net" / "weights.safetensors")
    small = [*TINY_RESNET, *QUIET, "model=resnet18", "model.in_channels=1", f"init_from={tmp_path / 'net'}"]
    with pytest.raises(
        ConfigError, match=r"3 of another shape or type: conv1.weight \[64, 3, 7, 7\] in .* fc.bias \[7\]"
    ):
        started(*small)
    run = started(*small, "init_strict=false")
    loaded = run.state.model.state_dict()
    assert all(
        torch.equal(loaded[name], v) for name, v in torchvisions.state_dict().items() if loaded[name].shape == v.shape
    )
    assert "119 of 122 tensors" in opening(capsys)
    assert run.state.model.conv1.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("precision", ["bf16_params", "bf16"])
def test_weights_take_the_precision_of_the_run(started, source, precision):
    run = started(*SMALL, f"precision={precision}", f"init_from={source}")
    saved, dtypes = weights(source), set()
    for name, value in run.state.model.state_dict().items():
        assert torch.equal(value, saved[name].to(value.dtype)), name
        dtypes.add(value.dtype)
    assert (torch.bfloat16 in dtypes) == (precision == "bf16_params")


# ---- resuming


@pytest.mark.slow
def test_a_resumed_run_does_not_need_its_source(tmp_path, source, text):
    gone = shutil.copytree(source, tmp_path / "gone")
    tuned = [*SMALL, *text, f"init_from={gone}"]
    whole = trained(tmp_path / "whole", *tuned, "steps=8").folder
    cut = trained(tmp_path / "cut", *tuned).folder
    record = json.loads((cut / "run.json").read_text())["init_from"]
    shutil.rmtree(gone)
    resumed = stabletrain.train([f"resume={cut}", "steps=8"])
    assert resumed.folder == cut
    assert equal(weights(cut), weights(whole))
    assert metrics(cut) == metrics(whole)
    assert json.loads((cut / "run.json").read_text())["init_from"] == record


@pytest.mark.slow
def test_a_checkpoint_is_resumed_in_a_new_folder_and_no_other_weights_may_be_named(tmp_path, source):
    gone = shutil.copytree(source, tmp_path / "gone")
    run = trained(tmp_path / "run", *SMALL, f"init_from={gone}", "steps=8").folder
    shutil.rmtree(gone)
    first = run / "checkpoints" / "step-00000004"
    again = stabletrain.train([f"resume={first}", f"hydra.run.dir={tmp_path / 'again'}"]).folder
    assert equal(weights(again), weights(run))
    for resume in (run, first):
        with pytest.raises(ConfigError, match=r"run has init_from=.*gone, which a resume cannot change"):
            stabletrain.train([f"resume={resume}", "steps=9", f"init_from={source}"])


@pytest.mark.slow
def test_a_run_that_lost_its_checkpoints_starts_again_from_the_same_weights(tmp_path, source):
    gone = shutil.copytree(source, tmp_path / "gone")
    tuned = [*SMALL, f"init_from={gone}"]
    folder = trained(tmp_path / "run", *tuned).folder
    damage(folder)
    again = stabletrain.train([*tuned, "resume=auto", f"hydra.run.dir={folder}", "steps=5"])
    assert again.metrics["steps"] == 5
    assert equal(weights(trained(tmp_path / "five", *tuned, "steps=5").folder), weights(folder))
    damage(folder)
    shutil.rmtree(gone)
    with pytest.raises(ConfigError, match=r"init_from=.*gone: there is no such folder"):
        stabletrain.train([*tuned, "resume=auto", f"hydra.run.dir={folder}", "steps=6"])


def damage(run):
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "model.safetensors").write_bytes(b"damaged")


@pytest.mark.beside
@pytest.mark.slow
def test_an_incident_is_replayed_without_the_source(tmp_path, source):
    gone = shutil.copytree(source, tmp_path / "gone")
    tuned = [*(each for each in SMALL if each != "forensics=off"), f"init_from={gone}", "faults=label", "faults.at=[2]"]
    run = trained(tmp_path / "run", *tuned).folder
    shutil.rmtree(gone)
    (incident,) = (run / "incidents").glob("step-*")
    replayed = replay_incident(incident)
    assert not replayed.fresh
    assert (replayed.now.loss, replayed.now.grad_norm) == (replayed.then.loss, replayed.then.grad_norm)
    with pytest.raises(ConfigError, match=r"init_from=x does not affect one step's forward and backward"):
        replay_incident(incident, ["init_from=x"])


def test_keys_that_would_do_nothing_are_refused(tmp_path, source):
    with pytest.raises(ConfigError, match="init_strict=false does nothing without init_from"):
        trained(tmp_path / "a", *SMALL, "init_strict=false")
    with pytest.raises(ConfigError, match=r"init_from=.*/mad: there is no such folder; did you mean made\?"):
        trained(tmp_path / "b", *SMALL, f"init_from={str(source)[:-1]}")
    assert (
        not (tmp_path / "b" / "run.json").exists()
        or json.loads((tmp_path / "b/run.json").read_text())["status"] == "failed"
    )


@pytest.mark.beside
@pytest.mark.slow
def test_a_comparison_shows_where_the_weights_came_from(tmp_path, source):
    trained(tmp_path / "runs" / "own", *SMALL)
    trained(tmp_path / "runs" / "tuned", *SMALL, f"init_from={source}")
    shown = stabletrain.compare(tmp_path / "runs")
    assert set(shown["settings.init_from"].astype(str)) == {"none", str(source)}


# ---- GPT-2


@pytest.fixture(scope="module")
def gpt2(place):
    """A tiny GPT-2 that transformers saved; also the model."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # so that biases, gains and the GELU matter
    model.save_pretrained(place / "gpt2")
    return place / "gpt2", model


TINY_GPT2 = ["model=gpt2", *TINY_GPT, *QUIET, "precision=fp32", "steps=1", "model.block_size=32"]


@pytest.mark.slow(unless=lambda sharded: sharded)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_of_transformers_gives_the_same_first_loss(tmp_path, started, gpt2, sharded, capsys):
    folder, model = gpt2
    if sharded:
        folder = tmp_path / "sharded"
        model.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
    run = started(*TINY_GPT2, f"init_from={folder}")
    assert " tensors\n" in opening(capsys)
    batch = run.data.load(0)
    with torch.no_grad():
        theirs = F.cross_entropy(model(batch.inputs).logits.flatten(0, 1), batch.targets.flatten())
    result = trained(tmp_path / "run", *TINY_GPT2, f"init_from={folder}")
    first = read_jsonl(result.folder / "metrics.jsonl")
    assert next(iter(first))["train/loss"] == pytest.approx(theirs.item(), abs=1e-5)
    record = json.loads((result.folder / "run.json").read_text())["init_from"]
    assert record["kind"] == "gpt2"


def test_a_gpt2_of_other_sizes_says_what_to_type(started, gpt2, capsys):
    folder, _ = gpt2
    with pytest.raises(ConfigError) as error:
        started("model=gpt2", *TINY_GPT, *QUIET, "model.mlp=gelu", "model.n_layer=1", f"init_from={folder}")
    assert str(error.value).endswith(
        "mlp is gelu_tanh in the source and gelu here; type model.block_size=32 model.n_layer=2 model.mlp=gelu_tanh to "
        "build the source's model, or init_strict=false to load what fits"
    )
    with pytest.raises(ConfigError, match="another norm_placement; type norm_placement=pre to build"):
        started(*TINY_GPT2, "norm_placement=reordered", f"init_from={folder}")
    started(*TINY_GPT2, "model.vocab_size=300", f"init_from={folder}", "init_strict=false")
    assert "35 of 36 tensors; 1 of another shape or type: embedding.weight [256, 16] in the source" in opening(capsys)


def test_an_untied_head_and_ids_that_mean_other_tokens(started, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=300, n_positions=32, n_embd=16, n_layer=2, n_head=2, tie_word_embeddings=False
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "untied")
    typed = [*TINY_GPT2, f"init_from={tmp_path / 'untied'}"]
    with pytest.raises(
        ConfigError, match="type model.vocab_size=300 model.tied_head=false to build the source's model"
    ):
        started(*typed)
    run = started(*typed, "model.vocab_size=300", "model.tied_head=false")
    assert torch.equal(run.state.model.head.weight, model.lm_head.weight)
    assert "the source's vocabulary has 300 ids, the data's 256: an id may mean another token" in opening(capsys)
