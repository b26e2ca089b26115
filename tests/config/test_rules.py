"""The table of rules: each is about keys that exist. `tests/refusals` breaks each of them."""

import yaml

from stabletrain.config.composed import composed_job
from stabletrain.config.make import plain
from stabletrain.config.rules import ANY_KEY, ANY_TYPED, RULES
from tests.runs import CONF, composed


def test_a_rule_is_about_keys_and_groups_that_exist():
    known = {*yaml.safe_load((CONF / "config.yaml").read_text())}
    for file in CONF.glob("*/*.yaml"):
        known |= {file.parent.name, *(f"{file.parent.name}.{key}" for key in yaml.safe_load(file.read_text()) or {})}
    named = {key for rule in RULES if rule.keys not in (ANY_KEY, ANY_TYPED) for key in rule.keys.split()}
    assert named - known == set()


def test_a_configuration_that_works_breaks_no_rule():
    with composed() as cfg:
        run = composed_job(plain(cfg))
    for rule in RULES:
        assert rule.check(run) is None, "raises nothing"
