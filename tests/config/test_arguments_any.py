"""Any command line: it can be taken apart and put together again, and a wrong one gives a ConfigError alone."""

import json
import os
import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from stabletrain.config import trust
from stabletrain.config.arguments import (
    OPTIONS_WITH_VALUE,
    Arguments,
    check_folders,
    key_of,
    merged,
    parse_arguments,
    quoted,
    resolve_resume,
    unquoted,
)
from stabletrain.errors import ConfigError

FIXED = settings(derandomize=True, deadline=None, database=None, suppress_health_check=[*HealthCheck])

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
"""What a shell can pass on, with quotes, spaces, backslashes, and letters of any script."""

KEYS = st.sampled_from(
    ["seed", "steps", "guard", "clipping", "clipping.max_norm", "clipping.clip", "optimizer", "optimizer.lr",
     "optimizer.lrr", "sede", "hydra.run.dir", "hydra.sweep.dir", "hydra/launcher", "", "data.path", "ключ"]
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(["1", "0,1", "null", "off", "norm", "agc", "zclip", "adamw", "sgd", "", "''", "[0.8,0.9]", "a=b"]),
    st.sampled_from(["${steps}", "range(1,3)", "{a:1}", "'it''s'", "\\", "'\\'", '"', "~", "."]),
    TEXT,
    TEXT.map(quoted),
)
OVERRIDES = st.one_of(
    st.builds("{}{}={}".format, st.sampled_from(["", "", "", "+", "++", "~"]), KEYS, VALUES),
    st.builds("~{}".format, KEYS),
    TEXT.filter(lambda word: not word.startswith("-")),
)
PLACES = ["run", "run/checkpoints", "run/checkpoints/step-00000004", "sweep", "empty", "a file", "nowhere", "auto"]
PLACES += ["none", "", " ", ".", "/", "damaged", "x" * 5000, "it's", "run\x00", "\udcff"]
RESUME = st.sampled_from(PLACES).flatmap(lambda place: st.sampled_from([f"resume={place}", f"resume={quoted(place)}"]))
TAKING = st.sampled_from(sorted(OPTIONS_WITH_VALUE))
OPTIONS = st.one_of(
    st.sampled_from([["-m"], ["--multirun"], ["--resolve"], ["--cfg=job"], ["--hydra-help"], ["-x"], ["--"]]),
    st.tuples(st.sampled_from(sorted(OPTIONS_WITH_VALUE)), st.sampled_from(["job", "own", "", "-m", "seed=1"])).map(
        list
    ),
    st.sampled_from(sorted(OPTIONS_WITH_VALUE)).map(lambda option: [option]),
    st.sampled_from(sorted(OPTIONS_WITH_VALUE)).map(lambda option: [f"{option}="]),
)
WORDS = st.lists(st.one_of(OVERRIDES, OVERRIDES, RESUME).map(lambda word: [word]) | OPTIONS, max_size=7).map(
    lambda words: [word for each in words for word in each]
)
"""The words of a command line: options anywhere, keys with typos, values with quotes and none."""


def accepted(typed: Arguments) -> bool:
    """Whether a command line is checked without an error."""
    try:
        check_folders(typed)
    except ConfigError:
        return False
    return True


def parsed(words: list[str]) -> Arguments:
    """A command line that is checked without an error; an option without its value would take the next word for it."""
    typed = parse_arguments(words)
    assume(accepted(typed))
    return typed


@settings(FIXED, max_examples=150)
@given(WORDS)
def test_a_command_line_can_be_written_out_and_read_again(words):
    typed = parsed(words)
    words = [*typed.options, *typed.overrides]
    assert parse_arguments(words) == typed
    assert parse_arguments(shlex.split(shlex.join(words))) == typed


@settings(FIXED, max_examples=100)
@given(TEXT)
@example("a\\'b\\")
@example("\\\\")
def test_a_quoted_text_is_read_as_itself_and_hydra_reads_the_same(text):
    assert unquoted(quoted(text)) == text
    assert parse_arguments([f"data.path={quoted(text)}"]).value("data.path") == text
    [parsed] = OverridesParser.create().parse_overrides([f"data.path={quoted(text)}"])
    assert parsed.value() == text


@settings(FIXED, max_examples=100)
@given(WORDS, st.data())
def test_the_order_of_different_keys_does_not_change_the_identity(words, data):
    typed = parse_arguments(words)
    shuffled = data.draw(st.permutations(typed.overrides))
    assert parse_arguments(shuffled).identity() == typed.identity()
    assert parse_arguments([*shuffled, "resume=auto", "hydra.run.dir=a"]).identity() == typed.identity()


@settings(FIXED, max_examples=150)
@given(WORDS, WORDS)
def test_merging_recorded_arguments_twice_is_as_once_and_typed_ones_win(before, now):
    recorded, typed = parsed(before), parsed(now)
    once = merged(recorded, typed)
    assert merged(recorded, once) == once
    for override in typed.overrides:
        assert override in once.overrides
    taken = {key_of(override) for override in typed.overrides}
    assert {*once.overrides} <= {*typed.overrides, *(o for o in recorded.overrides if key_of(o) not in taken)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run, a sweep, and what is neither."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("run", "outputs/day/time", "it's"):
        run = folder / name
        (run / "checkpoints" / "step-00000004").mkdir(parents=True)
        (run / "checkpoints" / "step-00000004" / "manifest.json").write_text("{}")
        recorded = ["seed=1", "clipping=norm", "clipping.max_norm=2"]
        (run / "run.json").write_text(json.dumps({"options": [], "overrides": recorded}))
        trust.remember_arguments([], recorded)
    (folder / "sweep").mkdir()
    (folder / "sweep" / "sweep.json").write_text(json.dumps({"options": ["-m"], "overrides": ["seed=0,1"]}))
    trust.remember_arguments([], ["seed=0,1"])
    (folder / "damaged" / "checkpoints").mkdir(parents=True)
    (folder / "damaged" / "run.json").write_text("{")
    (folder / "empty").mkdir()
    (folder / "a file").touch()
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.mark.usefixtures("place")
def test_what_is_resumed_stays_and_a_wrong_line_gives_a_config_error():
    told = set()

    @settings(FIXED, max_examples=200)
    @given(WORDS, RESUME.map(lambda word: [word]) | st.just([]))
    @example([], ["resume=" + "x" * 5000])
    def holds(words, resume):
        typed = parse_arguments(words)
        typed = parsed([*typed.options, *typed.overrides, *resume])
        try:
            found = resolve_resume(typed)
        except ConfigError:
            told.add("refused")
            return
        told.add(found.value("resume"))
        if accepted(found) and not found.sweeps:
            assert resolve_resume(found) == found, "resolved once, nothing is left to resolve"
            assert parse_arguments([*found.options, *found.overrides]) == found
        for override in typed.overrides:
            if not key_of(override).startswith("hydra") and key_of(override) != "resume":
                assert override in found.overrides, "what is typed takes precedence"

    holds()
    assert told >= {"refused", None, "auto", "none", "run/checkpoints/step-00000004"}
