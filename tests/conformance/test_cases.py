"""The cases are data: reproducible, named, and about every rule there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from portable_attention.conformance import cases
from portable_attention.conformance.capabilities import ALL, CAPABILITIES
from portable_attention.conformance.checks import CHECKS
from portable_attention.conformance.generator import Array, words
from portable_attention.conformance.oracle import steps_of

SEMANTICS = Path(__file__).parents[2] / "docs" / "semantics.md"
ANCHORS = set(re.findall(r'<a id="([^"]+)">', SEMANTICS.read_text(encoding="utf-8")))
# Headings above rules; what is about this library's own functions, or about no call at all.
NOT_OF_A_CALL = {
    "positions", "what-comes-out", "engine-and-tiling", "engine", "states", "partial-attention",
    "memory", "other-libraries", "lse", "arrays", "explain",
}  # fmt: skip


def split_mix_64(seed, count):
    """The generator once more, in plain integers."""
    found, state = [], seed
    for _ in range(count):
        state = state + 0x9E3779B97F4A7C15 & 2**64 - 1
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        z = (z ^ z >> 27) * 0x94D049BB133111EB & 2**64 - 1
        found.append(z ^ z >> 31)
    return found


@pytest.mark.parametrize("seed", [0, 1, 12345, 2_000_007])
def test_words_are_those_of_split_mix_64(seed):
    assert [int(word) for word in words(seed, 40)] == split_mix_64(seed, 40)


def test_bell_in_plain_integers():
    numbers = Array((3, 4), "bell", "float64", seed=5, gain=0.5).make().reshape(-1)
    for number, word in zip(numbers, split_mix_64(5, 12), strict=True):
        total = sum(word >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 131070
        assert number == 0.5 * (total / 32768)


def test_bell_is_centred_and_bounded():
    numbers = Array((100_000,), "bell", "float64", seed=1).make()
    assert abs(numbers.mean()) < 0.02
    assert abs(numbers.std() - 2 / np.sqrt(3)) < 0.02
    assert abs(numbers).max() < 4


def test_bits_in_plain_integers():
    found = Array((64,), "bits", "bool", seed=9, share=0.3).make()
    assert found.tolist() == [word >> 11 < 0.3 * 2**53 for word in split_mix_64(9, 64)]


def test_ids_are_unique_and_grouped():
    ids = [case.id for case in cases.all_cases()]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[a-z0-9]+/[a-z0-9-]+", name) for name in ids)


def test_seeds_are_not_shared_by_accident():
    """Two arrays of a call that hold the same numbers hide what a mixture of them does."""
    for case in cases.all_cases():
        arrays = [array for array in case.arrays.values() if array.kind == "bell"]
        seeds = [array.seed for array in arrays]
        assert len(seeds) == len(set(seeds)), case.id


@pytest.mark.parametrize("case", cases.all_cases(), ids=lambda case: case.id)
def test_each_case_is_well_formed(case):
    assert case.rule in ANCHORS
    assert case.shows.endswith(".")
    assert case.check in CHECKS
    assert set(case.also) <= ALL
    if case.check == "refusal":
        return
    assert case.needs() <= ALL
    assert json.loads(json.dumps(case.described(), allow_nan=False))["id"] == case.id
    steps = steps_of(**case.call().arguments)
    if case.id.partition("/")[0] not in ("zero", "empty", "poison"):
        assert steps.allowed.any()


def test_every_rule_of_a_call_has_a_case():
    assert ANCHORS - {case.rule for case in cases.all_cases()} <= NOT_OF_A_CALL


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_capability_has_a_case(capability):
    assert any(capability in case.needs() for case in cases.all_cases())


def test_quick_cases_are_most_of_the_cases():
    assert len(cases.select(quick=True)) > 0.9 * len(cases.select())


def test_cases_are_selected_by_group_and_by_id():
    assert {case.id.partition("/")[0] for case in cases.select(ids=["window"])} == {"window"}
    assert [case.id for case in cases.select(ids=["scale/zero"])] == ["scale/zero"]


def test_a_case_in_another_dtype():
    half = cases.find("scale/default").in_dtype("float16")
    assert half.call().dtype == "float16"
    assert half.is_in_range()
    assert not cases.find("mask/selects").in_dtype("float16").is_in_range()
