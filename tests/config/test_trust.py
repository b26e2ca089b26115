"""A folder from elsewhere runs no code of its own, and a user's own runs do as before."""

import importlib
import json
import pickle
import runpy
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf

import stabletrain
from stabletrain.cli.commands import main
from stabletrain.config import trust
from stabletrain.errors import ConfigError
from stabletrain.guard.guard import Guard
from tests.once import once
from tests.runs import TINY_GPT

TINY = [*TINY_GPT, "steps=8", "guard=skip", "report=false", "precision=fp32", "faults=label", "faults.at=[5]"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Another user's run, with an incident and an export."""

    def make(folder):
        stabletrain.train([*TINY, f"hydra.run.dir={folder}"])
        assert main(["export", str(folder), "--to", "safetensors", "--out", str(folder / "exported")]) == 0

    return once(tmp_path_factory, "theirs", make)


@pytest.fixture
def run(sound, tmp_path, monkeypatch):
    """A copy, in the state of a user who has made nothing; the working folder is another."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    copy = tmp_path / "run"
    shutil.copytree(sound, copy)
    return copy


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (open, (str(self.mark), "w"))


def nodes(run, mark):
    """Returns configurations that write the file `mark` if they are built."""
    pickled = run / "pickled"
    pickled.write_bytes(pickle.dumps(Payload(mark)))
    array = run / "array.npy"
    np.save(array, np.array([Payload(mark)], dtype=object), allow_pickle=True)
    torch.save(Payload(mark), run / "saved.pt")
    here = str(run / "pickled")
    return {
        "open": {"_target_": "builtins.open", "file": str(mark), "mode": "w"},
        "copy": {"_target_": "shutil.copyfile", "src": here, "dst": str(mark)},
        "savetxt": {"_target_": "numpy.savetxt", "fname": str(mark), "X": [1.0]},
        "read_pickle": {"_target_": "pandas.read_pickle", "filepath_or_buffer": here},
        "numpy.load": {"_target_": "numpy.load", "file": str(array), "allow_pickle": True},
        "torch.load": {"_target_": "torch.load", "f": str(run / "saved.pt"), "weights_only": False},
        "system": {"_target_": "os.system", "command": f"touch {mark}"},
        "touch": {"_target_": "subprocess.run", "args": ["touch", str(mark)]},
        "our own": {"_target_": "stabletrain.machine.slurm.run_slurm", "_args_": ["touch", str(mark)]},
        "our writer": {"_target_": "stabletrain.tracking.metrics.replace", "path": str(mark), "text": "x"},
        "torch's os": {"_target_": "torch.nn.modules.module.os.system", "_args_": [f"touch {mark}"]},
        "torch.nn's": {"_target_": "torch.nn.modules.module.warnings.sys.modules", "_args_": []},
        "partial": {"_target_": "builtins.open", "_partial_": True, "file": str(mark), "mode": "w"},
        "a module there": {"_target_": "inside.made"},
    }


KINDS = ("open", "copy", "savetxt", "read_pickle", "numpy.load", "torch.load", "system", "touch", "our own",
         "our writer", "torch's os", "torch.nn's", "partial", "a module there")  # fmt: skip


def tamper(run, kind, mark, place):
    """Writes a configuration of a kind into every record of a run."""
    (run / "inside.py").write_text(f"open({str(mark)!r}, 'w')\nmade = dict\n")
    node = nodes(run, mark)[kind]

    def spoilt(config):
        if place == "group":
            return {**config, **dict.fromkeys(("model", "data", "optimizer", "precision"), node)}
        deep = {**config["model"], "mlp": node}
        return {**config, "model": deep}

    file = run / ".hydra" / "config.yaml"
    file.write_text(yaml.safe_dump(spoilt(OmegaConf.to_container(OmegaConf.load(file), resolve=True))))
    for file in run.glob("incidents/*/step.json"):
        step = json.loads(file.read_text())
        step["about"]["config"] = spoilt(step["about"]["config"])
        file.write_text(json.dumps(step))
    file = run / "exported" / "config.json"
    file.write_text(json.dumps(spoilt(json.loads(file.read_text()))))
    record = json.loads((run / "run.json").read_text())
    flow = json.dumps(node).replace('"', "'").replace("': ", "':")
    key = "model" if place == "group" else "+model.extra"
    record["overrides"] = [each for each in record["overrides"] if not each.startswith("model")]
    record["overrides"] += [f"{key}={flow}"]
    (run / "run.json").write_text(json.dumps(record))


def calls(run):
    """Returns every command that reads a run, by name."""
    incident = next(run.glob("incidents/step-*"))

    def typed(*words):
        return lambda: main([str(word) for word in words])

    def resumed():
        stabletrain.train([f"resume={run}", "steps=9"])

    def from_checkpoint():
        stabletrain.train([f"resume={next(run.glob('checkpoints/step-*'))}", "steps=9"])

    return {
        "sample": typed("sample", run, "--tokens", 2),
        "export": typed("export", run, "--to", "safetensors"),
        "replay": typed("replay", incident),
        "replay with a fix": typed("replay", incident, "precision=bf16"),
        "whatif": typed("whatif", run, "--from", "4", "--steps", "0"),
        "diagnose": typed("diagnose", run),
        "compare": typed("compare", run),
        "losses": typed("losses", run, run / "losses.svg"),
        "forecast": typed("forecast", run),
        "resume": resumed,
        "resume of a checkpoint": from_checkpoint,
        "load": lambda: stabletrain.load(run),
        "load of an export": lambda: stabletrain.load(run / "exported"),
        "init_from": lambda: stabletrain.train([*TINY, "steps=1", f"init_from={run}"]),
        "init_from an export": lambda: stabletrain.train([*TINY, "steps=1", f"init_from={run / 'exported'}"]),
    }


READERS = ("diagnose", "compare", "losses", "forecast", "init_from", "init_from an export")
"""Commands that build nothing from the record."""


@pytest.mark.beside
@pytest.mark.slow(unless=lambda kind, place: kind in ("open", "our own", "a module there") and place == "group")
@pytest.mark.parametrize("place", ["group", "argument"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_command_builds_what_a_folder_from_elsewhere_names(run, tmp_path, capsys, kind, place):
    mark = tmp_path / "here" / "mark"
    tamper(run, kind, mark, place)
    named = nodes(run, mark)[kind]["_target_"]
    for name, call in calls(run).items():
        if name in READERS:
            continue
        before = {*sys.modules}
        try:
            code, said = call(), capsys.readouterr().err
        except ConfigError as error:
            code, said = 2, str(error)
        assert not mark.exists(), name
        assert "inside" not in {*sys.modules} - before, name
        assert code == 2, name
        assert named in said, (name, said)
        assert "add --trust" in said, (name, said)


@pytest.mark.beside
@pytest.mark.slow(unless=lambda kind: kind == "open")
@pytest.mark.parametrize("kind", ["open", "torch.load", "a module there"])
def test_commands_that_only_read_build_nothing(run, tmp_path, kind):
    mark = tmp_path / "here" / "mark"
    tamper(run, kind, mark, "group")
    for name, call in calls(run).items():
        if name in READERS:
            assert not isinstance(code := call(), int) or code == 0, name
            assert not mark.exists(), name
            assert "inside" not in sys.modules, name


ARGUMENTS = [
    ["hydra.job_logging.handlers.x={'()':os.system,command:x}"],
    ["+hydra.callbacks.x._target_=os.system"],
    ["hydra.searchpath=[file://here]"],
    ["model._target_=os.system"],
    ["optimizer._target_=os.system"],
    ["+model.x='${oc.decode:\"{_target_: os.system}\"}'"],
    ["+model.x=[{_target_: os.system}]"],
    ["--config-dir", "here"],
    ["--config-dir=here"],
    ["--config-path", "here"],
    ["-cn", "other"],
    ["--experimental-rerun", "here/config.pickle"],
    ["--exp=here/config.pickle"],
    ["-m"],
    ["model=../../../here/evil"],
    ["experiment=[/here/evil]"],
    ["experiment=gpt_stdlib,../here/evil"],
    ["hydra/launcher=../../here/evil"],
    ["+experiment@model=../here/evil"],
    ["+model.x='\\${oc.decode:\"{_target_: os.system}\"}'"],
    ["hydra.run.dir=here"],
    ["hydra.output_subdir=../here"],
]


@pytest.mark.beside
@pytest.mark.parametrize("words", ARGUMENTS, ids=" ".join)
def test_a_recorded_command_from_elsewhere_is_refused(run, words):
    record = json.loads((run / "run.json").read_text())
    place = "options" if words[0].startswith("-") else "overrides"
    record[place] = [*record[place], *words]
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="add --trust"):
        stabletrain.train([f"resume={run}", "steps=9"])


TEXTS = [
    '${oc.decode:"{_target_: builtins.open, file: mark, mode: w}"}',
    "${oc.create:{_target_: builtins.open, file: mark, mode: w}}",
    "${oc.decode:${oc.env:NODE}}",
    '\\${oc.decode:"{_target_: builtins.open, file: mark, mode: w}"}',
    '\\\\\\${oc.decode:"{_target_: builtins.open, file: mark, mode: w}"}',
]
"""Texts that are resolved to a node which writes the file `mark`; with a backslash, when they are resolved again."""


@pytest.mark.beside
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_becomes_a_target_is_refused(run, tmp_path, monkeypatch, capsys, text):
    monkeypatch.setenv("NODE", "{_target_: builtins.open, file: mark, mode: w}")
    file = run / ".hydra" / "config.yaml"
    config = OmegaConf.to_container(OmegaConf.load(file))
    config["model"]["mlp"] = text
    file.write_text(yaml.safe_dump(config))
    incident, exported = next(run.glob("incidents/*/step.json")), run / "exported" / "config.json"
    step, group = json.loads(incident.read_text()), json.loads(exported.read_text())
    step["about"]["config"]["model"]["mlp"] = group["model"]["mlp"] = text
    incident.write_text(json.dumps(step))
    exported.write_text(json.dumps(group))
    for name in ("sample", "replay", "load", "load of an export"):
        try:
            code, said = calls(run)[name](), capsys.readouterr().err
        except ConfigError as error:
            code, said = 2, str(error)
        assert not (tmp_path / "here" / "mark").exists(), name
        assert (code, "add --trust" in said) == (2, True), (name, said)


@pytest.mark.beside
def test_what_a_later_resume_has_changed_is_checked_too(run):
    from stabletrain.beside.whatif.base import read_base

    record = json.loads((run / "run.json").read_text())
    record["changes"] = [{"step": 1, "keys": {"model._target_": ["x", "os.system"]}}]
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="names model._target_=os.system"):
        read_base(run, 4)
    trust.remember_arguments([], ["model._target_=os.system"])  # as the resume itself does
    assert read_base(run, 4).changes == ("model._target_=os.system",)


@pytest.mark.beside
@pytest.mark.parametrize(
    "fix",
    ["model._target_=os.system", "schedule._target_=a.b", "experiment=../evil", "+hydra.callbacks.x._target_=a.b"],
)
def test_an_arm_that_a_recorded_fix_names_is_refused(run, fix):
    from stabletrain.beside.whatif.arms import Arm, with_fixes
    from stabletrain.beside.whatif.base import read_base
    from stabletrain.beside.whatif.plan import judged

    base = read_base(run, 4)
    [_, arm] = with_fixes([Arm("nothing")], [fix])
    assert f"names {fix}, which could run any code" in judged(arm, base).refused
    assert "could run any code" not in judged(replace(arm, named="you"), base).refused


def test_what_pytorch_has_is_known():
    known = [
        *("torch.optim.AdamW", "torch.nn.Linear", "torchvision.models.resnet18"),
        *("stabletrain.models.gpt.GPT", "stabletrain.models.GPT"),
    ]
    assert [trust.is_known(each) for each in known[:4]] == [True] * 4
    wrong = [
        "torch.optim.os",
        "torch.nn.Module.eval",
        "torch.nn.functional",
        "torch.load",
        "torchvision.models.list_models",
    ]
    wrong += ["stabletrain.load", "", None, 5, "torch.nn", "torchvision.models.get_model", "os.system"]
    assert [trust.is_known(each) for each in wrong] == [False] * len(wrong)


OWN = """
import torch
class Mine(torch.optim.SGD):
    pass
"""


@pytest.fixture(scope="module")
def owns(tmp_path_factory):
    """A run with a class of the user's own, its code, and the state folder of that user."""

    def make(place):
        (place / "code").mkdir(parents=True)
        (place / "code" / "own_optimizer.py").write_text(OWN)
        typed = [*TINY, "optimizer=sgd", "optimizer._target_=own_optimizer.Mine", "hydra.run.dir=run"]
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(place / "code"))
            patch.setenv("XDG_STATE_HOME", str(place / "state"))
            patch.chdir(place)
            stabletrain.train(typed)

    return once(tmp_path_factory, "own_class", make)


@pytest.fixture
def own(owns, tmp_path, monkeypatch):
    """A copy of that run, for its user."""
    shutil.copytree(owns, tmp_path, dirs_exist_ok=True)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.mark.beside
def test_ones_own_run_is_trusted_wherever_it_goes(own, tmp_path):
    moved = shutil.move(own, tmp_path / "moved")
    assert stabletrain.train([f"resume={moved}", "steps=9"]).status == "finished"
    assert main(["replay", str(next(moved.glob("incidents/step-*")))]) == 0
    assert main(["sample", str(moved), "--tokens", "2"]) == 0


@pytest.mark.beside
def test_an_edited_run_is_no_longer_ones_own_and_trust_is_remembered(own, capsys):
    file = own / ".hydra" / "config.yaml"
    file.write_text(file.read_text().replace("seed: 0", "seed: 7").replace("own_optimizer.Mine", "own_optimizer.Other"))
    assert main(["sample", str(own), "--tokens", "2"]) == 2
    said = capsys.readouterr().err
    assert f"{file} names _target_=own_optimizer.Other" in said
    assert said.count("\n") == 1
    assert main(["sample", str(own), "--tokens", "2", "--trust"]) == 0
    assert main(["sample", str(own), "--tokens", "2"]) == 0


@pytest.mark.beside
def test_a_run_of_the_package_alone_leaves_nothing_in_the_state_folder(run, tmp_path):
    assert stabletrain.train([f"resume={run}", "steps=9"]).status == "finished"
    assert not (tmp_path / "state").exists()


@pytest.mark.beside
def test_resume_with_trust_goes_on(own, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    with pytest.raises(ConfigError, match="own_optimizer"):
        stabletrain.train([f"resume={own}", "steps=9"])
    assert stabletrain.train([f"resume={own}", "steps=9", "--trust"]).status == "finished"
    assert stabletrain.train([f"resume={own}", "steps=10"]).status == "finished"


LOOP = """
import torch
from torch import nn
model = nn.Linear(2, 1)
def closure(x):
    return model(x).square().mean()
"""


@pytest.fixture
def incident(tmp_path, monkeypatch):
    """An incident of a loop of the user's own, whose closure lies in a module."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own_loop.py").write_text(LOOP)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.delitem(sys.modules, "own_loop", raising=False)
    own_loop = importlib.import_module("own_loop")
    guard = Guard(own_loop.model, torch.optim.SGD(own_loop.model.parameters(), 0.1), folder=tmp_path / "guarded")
    guard.step(own_loop.closure, torch.full((2, 2), torch.nan))
    return next((tmp_path / "guarded").rglob("step.json")).parent


def test_a_loops_incident_is_replayed_by_its_own_user(incident, tmp_path, monkeypatch, capsys):
    assert main(["replay", str(incident)]) == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    assert main(["replay", str(incident)]) == 2
    assert "step.json names the module own_loop, which" in capsys.readouterr().err
    assert main(["replay", str(incident), "--trust"]) == 0
    assert main(["replay", str(incident)]) == 0


@pytest.mark.parametrize("trusts", [[], ["--trust"]], ids=["", "trusted"])
def test_nothing_is_imported_from_inside_an_incident(incident, tmp_path, monkeypatch, trusts):
    step = json.loads((incident / "step.json").read_text())
    (incident / "hidden_loop.py").write_text(LOOP + f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    step["closures"][0] |= {"path": str(incident), "module": "hidden_loop"}
    (incident / "step.json").write_text(json.dumps(step))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["replay", str(incident), *trusts]) == 2
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("where", ["incident", "run"])
def test_no_folder_of_a_run_is_searched_for_modules(incident, tmp_path, monkeypatch, capsys, where):
    folder = incident if where == "incident" else incident.parent
    (incident.parent / "run.json").write_text("{}")
    (folder / "tiktoken.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    step = json.loads((incident / "step.json").read_text())
    step["closures"][0]["path"] = str(folder)
    (incident / "step.json").write_text(json.dumps(step))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["replay", str(incident), "--trust"]) == 2
    assert "no code is run from an incident" in capsys.readouterr().err
    assert str(folder) not in sys.path


@pytest.mark.parametrize("key", ["path", "module", "name", "file"])
def test_a_damaged_record_of_a_closure_is_one_line(incident, capsys, key):
    step = json.loads((incident / "step.json").read_text())
    step["closures"][0][key] = 5
    (incident / "step.json").write_text(json.dumps(step))
    assert main(["replay", str(incident), "--trust"]) == 2
    said = capsys.readouterr().err
    assert f"closures/0/{key} is 5" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("sign", ["run.json", "step.json", ""])
def test_a_run_as_the_working_folder_is_not_searched_for_modules(tmp_path, monkeypatch, sign):
    monkeypatch.chdir(tmp_path)
    if sign:
        (tmp_path / sign).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "argv", ["stabletrain", "--version"])
    with pytest.raises(SystemExit):
        runpy.run_module("stabletrain", run_name="__main__")
    assert (str(tmp_path) in sys.path) == (not sign)


@pytest.mark.beside
@pytest.mark.parametrize("link", ["checkpoints", "incidents"])
def test_nothing_is_written_through_a_link_in_a_folder_whose_record_is_missing(run, tmp_path, link):
    target, place = tmp_path / "valuable", run / link
    shutil.move(place, target)
    place.symlink_to(target)
    (run / "run.json").unlink()
    (run / "metrics.jsonl").unlink()
    before = {*target.rglob("*")}
    with pytest.raises(ConfigError, match="is a link to"):
        stabletrain.train([*TINY, f"resume={run}", "steps=9"])
    assert {*target.rglob("*")} == before


LINKS = ["checkpoints", "incidents", "export", "whatif/step-00000000", "wandb"]


def linked(place, target):
    """Moves a folder of a run, or makes an empty one, and leaves a link."""
    place.parent.mkdir(exist_ok=True)
    shutil.move(place, target) if place.exists() else target.mkdir()
    place.symlink_to(target)


@pytest.mark.beside
@pytest.mark.parametrize("link", LINKS)
def test_nothing_is_written_through_a_link_in_a_folder_from_elsewhere(run, tmp_path, capsys, link):
    target, place = tmp_path / "valuable", run / link
    linked(place, target)
    before = {*target.rglob("*")}
    typed = ["export", str(run), "--to", "safetensors"], ["whatif", str(run), "--from", "4", "--steps", "0"]
    for command in typed:
        assert main(command) == 2
        assert f"{place} is a link to {target}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is a link to"):
        stabletrain.train([f"resume={run}", "steps=9"])
    assert {*target.rglob("*")} == before


@pytest.mark.beside
@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
def test_a_link_that_was_trusted_once_is_followed(run, tmp_path, link):
    linked(run / link, tmp_path / "valuable")
    assert stabletrain.train([f"resume={run}", "steps=9", "--trust"]).status == "finished"
    assert stabletrain.train([f"resume={run}", "steps=10"]).status == "finished"


@pytest.mark.beside
@pytest.mark.slow
def test_the_links_that_wandb_makes_itself_are_no_strangers(run, tmp_path):
    (run / "wandb" / "run-x").mkdir(parents=True)
    (run / "wandb" / "run-x" / "debug.log").symlink_to(tmp_path / "cache")
    assert stabletrain.train([f"resume={run}", "steps=9"]).status == "finished"


@pytest.mark.beside
def test_a_link_that_is_there_before_ones_own_run_begins_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for folder in ("large_disk", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "large_disk")
    stabletrain.train([*TINY, f"hydra.run.dir={tmp_path / 'run'}"])
    assert stabletrain.train([f"resume={tmp_path / 'run'}", "steps=9"]).status == "finished"
