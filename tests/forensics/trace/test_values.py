"""Checks the measured magnitude of tensors of every dtype and layout, and which storage they use."""

import math

import pytest
import torch

from stabletrain.forensics.trace.values import Values, leaves, measure, storage, tensors, unmeasured, whole

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_size_of_a_tensor_is_its_largest_magnitude(dtype):
    found = measure(torch.tensor([[1.0, -3.5, 0.0]]).to(dtype))
    assert found == Values((1, 3), str(dtype).removeprefix("torch."), 3.5)
    assert found.finite


def test_an_fp64_value_beyond_fp32_is_not_rounded():
    assert measure(torch.tensor(1e300, dtype=torch.float64)).absmax == 1e300


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_counts_as_the_largest(bad):
    found = measure(torch.tensor([1e30, bad, -1e38]))
    assert math.isnan(found.absmax) if math.isnan(bad) else found.absmax == math.inf
    assert not found.finite
    assert found.nan is math.isnan(bad)
    assert math.isnan(measure(torch.tensor([math.inf, math.nan])).absmax), "NaN takes precedence over Inf"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64], ids=str)
def test_non_finite_values_are_seen_in_every_dtype(dtype):
    values = torch.tensor([1.0, -3.0, 2.0]).to(dtype)
    assert measure(values * math.nan).nan
    if not dtype.is_complex:  # 1 / 0 is NaN for complex numbers
        assert measure(values / 0).absmax == math.inf


def test_the_size_of_a_complex_number_is_its_absolute_value():
    assert measure(torch.tensor([3 + 4j, 1 - 1j])) == Values((2,), "complex64", 5.0)
    assert measure(torch.tensor([complex(1, math.inf)])).absmax == math.inf


@pytest.mark.parametrize("tensor", [torch.arange(3), torch.tensor([True])], ids=["int", "bool"])
def test_integers_have_no_size_and_are_finite(tensor):
    found = measure(tensor)
    assert found.absmax is None
    assert found.finite
    assert not found.nan


def test_an_empty_tensor_has_size_0():
    assert measure(torch.empty(0, 3)) == Values((0, 3), "float32", 0.0)


@pytest.mark.parametrize("to", [torch.Tensor.to_sparse_coo, torch.Tensor.to_sparse_csr], ids=["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_tensor_is_measured_by_its_values_and_has_its_dense_shape(to):
    sparse = to(torch.tensor([[0.0, -7.0], [2.0, 0.0]]))
    assert measure(sparse) == Values((2, 2), "float32", 7.0)
    assert storage(sparse).nbytes() == 8


def test_a_view_shares_the_storage_of_its_tensor_and_is_not_whole():
    tensor = torch.zeros(4, 3)
    row, turned = tensor[1], tensor.t()
    assert storage(row)._cdata == storage(tensor)._cdata != storage(torch.zeros(4, 3))._cdata
    assert (whole(tensor), whole(turned), whole(row)) == (True, True, False)


def test_leaves_and_tensors_are_found_in_order():
    a, b = torch.zeros(1), torch.ones(1)
    nested = ([a, (1, {"x": b, "y": "text"})], None)
    assert [leaf if not isinstance(leaf, torch.Tensor) else leaf.item() for leaf in leaves(nested)] == [
        *(0.0, 1, 1.0, "text", None)
    ]
    assert [tensor is each for tensor, each in zip(tensors(nested), (a, b), strict=True)] == [True, True]


def test_uninitialised_memory_has_a_shape_and_no_size():
    (found,) = unmeasured([torch.full((2, 3), math.nan, dtype=torch.bfloat16)])
    assert found == Values((2, 3), "bfloat16", None)


def test_as_dict_says_whether_all_values_are_finite():
    found = measure(torch.tensor([1.0, math.inf])).as_dict()
    assert found == {"shape": [2], "dtype": "float32", "absmax": math.inf, "finite": False}
