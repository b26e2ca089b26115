"""Building the objects of config groups: plain values in, and the option's own error message out."""

from types import SimpleNamespace
from typing import Protocol

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from stabletrain.config import moved
from stabletrain.config.make import Choice, innermost, leaves, missing_parts, plain
from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.stability.schedule import ScheduleKind, WarmupKind
from stabletrain.trainer import option_roles
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


@pytest.mark.parametrize("group", ["warmup", "schedule", "guard", "clipping", "monitors", "faults"])
def test_each_option_fits_the_role_of_its_group(group):
    roles = {"warmup": WarmupKind, "schedule": ScheduleKind, "guard": option_roles.GuardOption}
    roles |= {"clipping": option_roles.ClippingOption, "monitors": option_roles.MonitorsOption}
    roles |= {"faults": option_roles.FaultsOption}
    for file in (CONF / group).glob("*.yaml"):
        cfg = OmegaConf.create({group: {k: v for k, v in OmegaConf.load(file).items() if k != "defaults"}})
        Choice.of(cfg, group, roles[group]).build()
