"""Building the objects of config groups: plain values in, and the option's own error message out."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from stabletrain.checkpoint.off import NoCheckpoints
from stabletrain.config import moved
from stabletrain.config.make import Choice, innermost, leaves, load_yaml, missing_parts, plain
from stabletrain.data.batches import Dataset
from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.extension import NoFaults, NoForecast
from stabletrain.forensics.handler import NoIncidentHandler
from stabletrain.guard.policy import NoGuard
from stabletrain.machine.determinism import Off
from stabletrain.monitors.monitors import NoMonitors
from stabletrain.parallel.single import SingleProcess
from stabletrain.stability.attention_gate import NoAttentionGate
from stabletrain.stability.averaging import NoAveraging
from stabletrain.stability.clipping import NoClip
from stabletrain.stability.init import TorchInit
from stabletrain.stability.norm_placement import PreNorm
from stabletrain.stability.objective import NoZLoss
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.qknorm import NoQKNorm
from stabletrain.stability.schedule import Constant, NoWarmup
from stabletrain.stability.softcap import NoSoftcap
from stabletrain.stability.softmax import PlainSoftmax
from stabletrain.tracking.wandb import NoWandb
from tests.runs import CONF, composed

HERE = "tests.config.test_make"


class Option:
    """Keeps what it is given; refuses a size below 1."""

    def __init__(self, size=1, names=(), **given):
        if size < 1:
            raise ConfigError(f"mine.size={size} is below 1")
        if size == 13:
            raise TrainingHalted("an unlucky number")
        if size == 99:
            raise OverflowError("too large")
        self.size, self.names, self.given = size, names, given


def option(target=f"{HERE}.Option", role=None, **keys):
    """The choice of a group `mine`, which builds an `Option`."""
    cfg = OmegaConf.create({"base": 3, "mine": {"_target_": target, **keys}})
    return Choice.of(cfg, "mine", role)


def test_it_builds_the_target_with_plain_values_and_what_is_given():
    made = option(size="${base}", names=["a", "b"]).build(device="cpu")
    assert isinstance(made, Option)
    assert (made.size, made.names, made.given) == (3, ["a", "b"], {"device": "cpu"})
    assert type(made.names) is list


def test_the_modality_is_not_handed_to_the_object():
    assert option(modality="tokens").build().given == {}


def test_building_leaves_the_choice_as_it_was():
    chosen = option(modality="tokens", names=["a"])
    chosen.build().names.append("b")
    assert chosen.node == {"_target_": f"{HERE}.Option", "modality": "tokens", "names": ["a"]}


def test_the_options_own_error_is_raised_without_hydras():
    with pytest.raises(ConfigError, match=r"^mine.size=0 is below 1$") as refusal:
        option(size=0).build()
    assert refusal.value.__cause__ is None
    assert refusal.value.__suppress_context__, "Hydra's own error is not shown"
    with pytest.raises(TrainingHalted, match="unlucky"):
        option(size=13).build()


def test_any_other_error_names_group_target_and_the_innermost_cause():
    with pytest.raises(ConfigError, match=rf"^mine=mine cannot be built from {HERE}.Option: too large$") as refusal:
        option(size=99).build()
    assert isinstance(refusal.value.__cause__, InstantiationException)


def test_a_key_that_the_option_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"^mine=mine cannot be built from datetime.timedelta: .*banana"):
        option("datetime.timedelta", banana=1).build()


def test_a_mistyped_target_is_answered_with_the_nearest_name():
    with pytest.raises(
        ConfigError, match=r"^mine=mine cannot be built from datetime.timedetla: .*; did you mean timedelta\?$"
    ):
        option("datetime.timedetla", days=1).build()


def test_a_module_that_python_cannot_import_is_answered_with_pythonpath():
    with pytest.raises(ConfigError, match=r"No module named 'no_such_code'; if it is your own code, set PYTHONPATH to"):
        option("no_such_code.Model").build()


def test_a_group_without_a_target_is_refused():
    with pytest.raises(ConfigError, match="mine=mine: its YAML has no _target_"):
        Choice("mine", {"size": 1}).build()


def test_the_message_names_the_chosen_option():
    with (
        composed("clipping=norm", "+clipping.banana=1") as cfg,
        pytest.raises(ConfigError, match=r"^clipping=norm cannot be built from .*banana"),
    ):
        Choice.of(cfg, "clipping", choices=HydraConfig.get().runtime.choices).build()


def test_a_target_that_moved_is_built_from_its_new_place(monkeypatch):
    monkeypatch.setitem(moved.MOVED, "ancient.Thing", f"{HERE}.Option")
    assert type(option("ancient.Thing", size=2).build()) is Option


def test_the_innermost_error_started_the_chain():
    first, second, third = ValueError("first"), RuntimeError("second"), KeyError("third")
    third.__cause__, second.__cause__ = second, first
    assert innermost(third) is first
    assert innermost(first) is first


def test_leaves_have_dotted_keys_and_lists_are_values():
    tree = {"a": 1, "b": {"c": [1, 2], "d": {}}, "e": None}
    assert dict(leaves(tree)) == {"a": 1, "b.c": [1, 2], "b.d": {}, "e": None}
    assert list(leaves({})) == []


def test_plain_values_have_their_interpolations_resolved():
    assert plain(OmegaConf.create({"a": 1, "b": {"c": "${a}"}})) == {"a": 1, "b": {"c": 1}}
    assert plain({"a": [1]}) == {"a": [1]}


def test_the_target_of_a_group_is_found_at_its_path_of_today_or_not_at_all(monkeypatch):
    assert option().code is Option
    monkeypatch.setitem(moved.MOVED, "somewhere.Else", f"{HERE}.Option")
    for path, found in {"somewhere.Else": Option, "builtins.Nothing": None, "tests.nowhere": None}.items():
        assert option(path).code is found


class Role(Protocol):
    """What the group `mine` needs."""

    size: int

    def run(self) -> None: ...
    def __call__(self) -> None: ...


class Fits:
    """Fits the role, although its size is not known yet."""

    run, __call__ = print, print

    @property
    def size(self):
        raise RuntimeError("not known yet")


def test_an_object_of_the_wrong_kind_is_told_what_it_lacks():
    with pytest.raises(ConfigError, match=r"^mine=mine: builtins.dict gives a dict, which has no size, run\(\), "):
        option("builtins.dict", Role).build()
    assert missing_parts({}, Role) == ["size", "run()", "__call__()"]
    assert missing_parts(SimpleNamespace(size=1, run=2), Role) == ["run()", "__call__()"]
    assert missing_parts(Fits(), Role) == []


ROLES: dict[str, Any] = {
    "attention_gate": NoAttentionGate,
    "checkpoint": NoCheckpoints,
    "clipping": NoClip,
    "data": Dataset,
    "averaging": NoAveraging,
    "determinism": Off,
    "faults": NoFaults,
    "forecast": NoForecast,
    "forensics": NoIncidentHandler,
    "guard": NoGuard,
    "init": TorchInit,
    "monitors": NoMonitors,
    "norm_placement": PreNorm,
    "optimizer": Callable,
    "parallel": SingleProcess,
    "precision": FullPrecision,
    "qkclip": NoQKClip,
    "qknorm": NoQKNorm,
    "schedule": Constant,
    "softcap": NoSoftcap,
    "softmax": PlainSoftmax,
    "wandb": NoWandb,
    "warmup": NoWarmup,
    "zloss": NoZLoss,
}
"""What `make` checks the object of each group for; a model must be an `nn.Module`, an objective callable."""

NOT_HERE = ("parallel/ddp", "parallel/fsdp", "parallel/hsdp", "precision/tf32")
NOT_HERE += ("data/cifar10", "data/imagefolder", "data/text", "data/tokens")
"""Options that need torchrun, a card or files."""


@pytest.mark.beside(when=lambda group: group == "faults")
@pytest.mark.parametrize("group", ROLES)
def test_each_option_fits_the_role_of_its_group(group):
    given = {"precision": {"device": torch.device("cpu")}}.get(group, {})
    files = [file for file in (CONF / group).glob("*.yaml") if f"{group}/{file.stem}" not in NOT_HERE]
    for file in files:
        keys = {key: value for key, value in OmegaConf.to_container(OmegaConf.load(file)).items() if key != "defaults"}
        Choice.of(OmegaConf.create({"seed": 0, group: keys}), group, ROLES[group]).build(**given)
    assert files


@pytest.mark.parametrize("group", ROLES)
def test_an_object_that_has_nothing_of_a_role_is_refused(group):
    with pytest.raises(ConfigError, match=f"^{group}=.*: builtins.dict gives a dict, which has no .*: the g"):
        Choice(group, {"_target_": "builtins.dict"}, role=ROLES[group]).build()


def test_a_users_object_fits_a_role_without_deriving_from_its_class():
    needed = {
        NoClip: ["__call__", "state_dict", "load_state_dict"],
        NoMonitors: ["due", "before", "after", "state_dict", "load_state_dict"],
        NoWandb: ["start", "log", "event", "summary", "alert", "finish"],
        NoIncidentHandler: ["newest", "open", "handle"],
    }
    for role, names in needed.items():
        assert missing_parts(type("Own", (), dict.fromkeys(names, print))(), role) == [], role


def test_a_role_lists_what_its_base_classes_need_too():
    class Base:
        size: int

        def run(self):
            self._helper()

        def _helper(self):
            """No plug-in needs it."""

    class Derived(Base):
        speed = 1.0

    assert missing_parts(SimpleNamespace(speed=2.0), Derived) == ["size", "run()"]


def test_a_file_of_yaml_is_read_as_it_is_now_and_each_reader_may_change_what_it_got(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("a: {b: 1}")
    load_yaml(file).a.b = 2
    assert load_yaml(file).a.b == 1
    file.write_text("a: {b: 3}")
    assert load_yaml(file).a.b == 3
