"""`init_from` on several ranks: every rank begins with the same weights, sharded or not."""

import json

import pytest

from stabletrain.checkpoint.folder import find
from stabletrain.checkpoint.tree import flatten
from tests.parallel.launches import alone, performed
from tests.parallel.worker import of_tensor
from tests.runs import TINY_GPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KINDS = ("ddp", "fsdp")
OTHER = {"ddp": "fsdp", "fsdp": "ddp"}
SMALL = [*TINY_GPT, "steps=2", "checkpoint.every=1", "forensics=off", "monitors=none", "precision=fp32", "report=false"]


@pytest.fixture(scope="module")
def place(shared_place):
    return shared_place / "init_from_two"


@pytest.fixture(scope="module")
def two(place):
    """Each kind of run; then runs of each kind that begin with the weights of the other."""
    place.mkdir(exist_ok=True)
    with alone(place / "before"):
        text = place / "text.txt"
        text.write_text("another text, and not much of it. " * 300)
    runs = {kind: {"overrides": [*SMALL, f"parallel={kind}", "seed=3"]} for kind in KINDS}
    fine = [*SMALL, "data=text", f"data.path={text}"]
    for kind in KINDS:
        start = [*fine, f"parallel={kind}", f"init_from={place / OTHER[kind]}"]
        runs[f"{kind}/tuned"] = {"overrides": start, "folder": f"{kind}-tuned", "tensors": True}
        again = {"overrides": [*start, "steps=3", "resume=auto"], "folder": f"{kind}-tuned", "tensors": True}
        runs[f"{kind}/resumed"] = again
    runs["gone"] = {"overrides": [*SMALL, "parallel=ddp", f"init_from={place / 'gone'}"]}
    runs["narrow"] = {"overrides": [*SMALL, "parallel=fsdp", "model.n_embd=32", f"init_from={place / 'ddp'}"]}
    return performed(place, 2, runs)


def saved_weights(folder):
    """Hashes of a run's last weights, as `worker.tensors_of` names them."""
    tensors, _ = flatten({"model": find(folder).load_model()})
    return {name: of_tensor(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_begins_with_the_weights_of_a_run_of_the_other_kind(two, place, kind):
    source = saved_weights(place / OTHER[kind])
    for seen in two:
        tuned = seen[f"{kind}/tuned"]
        assert tuned["error"] is None, tuned["message"]
        before = {name: each for name, each in tuned["tensors_before"].items() if name.startswith("model")}
        assert before == source
        assert tuned["tensors_after"] != tuned["tensors_before"]
    record = json.loads((place / f"{kind}-tuned" / "run.json").read_text())["init_from"]
    assert record["path"] == str(place / OTHER[kind] / "checkpoints" / "step-00000002")
    assert len(record["sha256"]) == (2 if OTHER[kind] == "fsdp" else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_continues_from_its_checkpoint(two, kind):
    for seen in two:
        resumed = seen[f"{kind}/resumed"]
        assert resumed["error"] is None, resumed["message"]
        assert resumed["tensors_before"] == seen[f"{kind}/tuned"]["tensors_after"]
        assert resumed["step"] == 3


def test_what_cannot_be_loaded_is_one_error_on_every_rank(two):
    for seen in two:
        assert (seen["gone"]["error"], seen["narrow"]["error"]) == ("ConfigError", "ConfigError")
        assert "gone: there is no such folder" in seen["gone"]["message"]
        assert "embedding.weight [256, 16] in the source, [256, 32] in the model" in seen["narrow"]["message"]
