"""Values that cannot be resolved: each is refused by the name of its key, with the reason and what to write."""

import pytest
from omegaconf import OmegaConf

from stabletrain.config.checks import check_resolves
from stabletrain.errors import ConfigError

REASONS = {
    "${nowhere}": "there is no key nowhere",
    "${stepps}": "there is no key stepps; fix: ${steps}, or write the value itself",
    "${hydra.run.dir}": "write ${hydra:run.dir}",
    "${nothing:1}": "there is no resolver nothing",
    "${oc.env:STABLETRAIN_NOT_THERE}": "it cannot be resolved",
    "${seed}": "it cannot be resolved",  # a circle
    "???": "??? stands for a value that must be given; fix: write the value itself",
}


@pytest.mark.parametrize("value", REASONS)
def test_the_key_is_named_with_the_reason(value):
    cfg = OmegaConf.create({"steps": 3, "seed": value, "data": {"seed": "${seed}"}, "names": ["a"]})
    with pytest.raises(ConfigError) as refusal:
        check_resolves(cfg)
    assert str(refusal.value).startswith(f"seed={value}: ")
    assert REASONS[value] in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_interpolation_within_a_list_or_for_a_whole_group_is_found():
    for key, cfg in {
        "betas": {"betas": [0.9, "${nowhere}"]},
        "optimizer": {"optimizer": "${nowhere}"},
    }.items():
        with pytest.raises(ConfigError, match=f"^{key}=.*there is no key nowhere"):
            check_resolves(OmegaConf.create(cfg))


def test_values_that_resolve_are_accepted():
    check_resolves(OmegaConf.create({"steps": 3, "data": {"seed": "${steps}"}, "home": "${oc.env:HOME,none}"}))
