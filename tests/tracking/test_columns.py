"""The columns of a comparison: the format of their values, and each output's list of columns."""

import pytest

from stabletrain.tracking.columns import (
    BY_IMPORTANCE,
    COLUMNS,
    IN_FRAME,
    IN_TABLE,
    IN_WANDB,
    ON_PAGE,
    digits,
    duration,
    percent,
    thousands,
    three_digits,
)


@pytest.mark.parametrize(
    ("write", "texts"),
    [
        (digits(4), {2.71828: "2.7183", 3.0: "3.0000"}),
        (three_digits, {12.345: "12.3", 0.00012345: "0.000123"}),
        (percent, {0.0: "0.0 %", 0.4567: "45.7 %", 1.0: "100.0 %", 0.00234: "0.2 %", 0.00012: "0.012 %"}),
        (thousands, {950: "950", 999.4: "999", 999.7: "1.00k", 14_600: "14.6k", 1_200_000: "1.20M"}),
        (duration, {48.4: "48 s", 599.9: "600 s", 600: "10 min", 3599: "60 min", 3600: "1.0 h", 12_240: "3.4 h"}),
    ],
    ids=["digits", "three digits", "percent", "thousands", "duration"],
)
def test_numbers_are_formatted_for_reading(write, texts):
    assert {value: write(value) for value in texts} == texts


@pytest.mark.parametrize(
    ("output", "meant"),
    {
        "frame": (IN_FRAME, lambda column: column.dtype),
        "table": (IN_TABLE, lambda column: column.head),
        "narrow table": (BY_IMPORTANCE, lambda column: column.head),
        "page": (ON_PAGE, lambda column: column.page_head),
        "wandb": (IN_WANDB, lambda column: column.summary),
    }.values(),
    ids=["frame", "table", "narrow table", "page", "wandb"],
)
def test_each_output_has_each_of_its_columns_once(output, meant):
    assert len({*output}) == len(output)
    assert {*output} == {name for name, column in COLUMNS.items() if meant(column)}


def test_columns_are_keyed_by_name_and_headings_are_unique():
    assert all(column.name == name for name, column in COLUMNS.items())
    for heads in ([column.head for column in COLUMNS.values()], [column.page_head for column in COLUMNS.values()]):
        shown = [head for head in heads if head]
        assert len({*shown}) == len(shown)


def test_only_accuracy_and_speed_are_better_when_higher():
    assert {name for name, column in COLUMNS.items() if column.higher_is_better} == {
        "val_accuracy",
        "units_per_s",
        "mfu",
    }
