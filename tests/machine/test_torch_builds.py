"""Which GPUs a build of PyTorch can run on, and which build is named for the others."""

import pytest
import torch

from stabletrain.machine import torch_builds
from stabletrain.machine.torch_builds import LEGACY_PACKAGES, can_run, install_command, refusal

DEFAULT = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
CUDA_12_6 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((7, 0), DEFAULT, False),
        ((7, 0), CUDA_12_6, True),
        ((6, 0), DEFAULT, False),
        ((6, 1), CUDA_12_6, True),
        ((7, 5), DEFAULT, True),
        ((8, 0), DEFAULT, True),
        ((8, 9), DEFAULT, True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((7, 0), ["sm_80", "compute_80"], False),
        ((12, 1), DEFAULT, True),
        ((12, 0), CUDA_12_6, False),
        ((10, 0), ["sm_120"], False),
        ((9, 0), ["sm_90a"], True),
        ((9, 1), ["sm_90a"], False),
        ((10, 0), ["compute_90a"], False),
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["compute_100f"], False),
    ],
)
def test_machine_code_runs_on_its_major_version_and_ptx_on_all_newer_cards(capability, architectures, runs):
    assert can_run(capability, architectures) is runs


@pytest.mark.parametrize("architectures", [[], ["gfx90a", "gfx942"]], ids=["cpu", "amd"])
def test_builds_without_nvidia_architectures_are_not_judged(architectures):
    assert can_run((7, 0), architectures)


@pytest.mark.parametrize(
    ("capability", "command"),
    [
        ((3, 7), ""),
        ((5, 0), f"pip install --upgrade --force-reinstall {LEGACY_PACKAGES}"),
        ((7, 0), f"pip install --upgrade --force-reinstall {LEGACY_PACKAGES}"),
        ((7, 5), "pip install --upgrade --force-reinstall torch torchvision"),
        ((12, 0), "pip install --upgrade --force-reinstall torch torchvision"),
    ],
)
def test_the_command_installs_a_build_for_the_card(capability, command):
    assert install_command(capability) == command


def test_a_refusal_names_the_card_its_capability_the_build_and_what_to_type():
    assert refusal("Tesla V100-SXM2-16GB", (7, 0), DEFAULT, "2.15.0+cu130") == (
        "Tesla V100-SXM2-16GB has compute capability 7.0, which this PyTorch (2.15.0+cu130) is not compiled for: it "
        "has sm_75, sm_80, sm_86, sm_90, sm_100, sm_120; install a build that has it: pip install --upgrade "
        '--force-reinstall "torch<2.15" torchvision --index-url https://download.pytorch.org/whl/cu126; or train on '
        "the CPU with device=cpu"
    )
    assert "no build of PyTorch 2.11 or newer has it; or train on the CPU" in refusal("K80", (3, 7), DEFAULT, "2.15.0")


def test_pytorchs_own_table_of_builds_agrees():
    table = getattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", None)
    if not table or "x86_64" not in next(iter(table.values())):
        pytest.skip(f"torch {torch.__version__} has no table of builds by machine")
    builds = {cuda: [f"sm_{each}" for each in sorted(by_machine["x86_64"])] for cuda, by_machine in table.items()}
    for cuda, architectures in builds.items():
        assert can_run((7, 0), architectures) is (cuda == "12.6")
        assert can_run(torch_builds.DEFAULT_CAPABILITY, architectures)
