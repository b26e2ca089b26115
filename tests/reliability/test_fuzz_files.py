"""The fuzz of damaged files draws the same damage for the same seed, and sees tracebacks and calls without end."""

import random
import shutil

import pytest

from stabletrain.errors import ConfigError
from tests.checkpoint.given import Run
from tests.reliability.damage import damage
from tests.reliability.fuzz_files import call, campaign


def raising(error):
    raise error


def endless():
    while True:
        pass


def test_the_same_seed_does_the_same_damage(tmp_path):
    for name in ("one", "two"):
        run = Run(tmp_path / name / "outputs" / "run")
        run.save(10)
        for part in ("multirun", "shards"):
            shutil.copytree(tmp_path / name / "outputs", tmp_path / name / part)
    for number in range(12):
        first, second = (damage(tmp_path / name, random.Random(number)) for name in ("one", "two"))
        assert first == second
        contents = [
            [(file.name, file.read_bytes()) for file in sorted((tmp_path / name).rglob("*")) if file.is_file()]
            for name in ("one", "two")
        ]
        assert contents[0] == contents[1]


@pytest.mark.parametrize(
    ("read", "answer", "failure"),
    [
        (lambda: None, "done", ""),
        (lambda: raising(ConfigError("a line")), "refused: a line", ""),
        (lambda: raising(SystemExit(2)), "refused: 2", ""),
        (lambda: raising(KeyError("x")), "done", "KeyError"),
        (lambda: print("Traceback (most recent call last):\nValueError: x"), "done", "printed a traceback: ValueError"),
        (endless, "done", "took more than"),
    ],
)
def test_what_is_a_failure(read, answer, failure):
    found, wrong, _ = call(read, 0.2)
    assert found == answer
    assert failure in wrong
    assert bool(failure) == bool(wrong)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_few_damaged_files(tmp_path):
    outcomes = [*campaign(tmp_path, [49, 106, 337], seed=0, processes=1)]
    assert [each.failures for each in outcomes] == [{}] * 3
    assert all("began after step" in each.output["resume"] for each in outcomes)
