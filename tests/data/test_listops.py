"""data/listops.py: the published grammar, and values against Python's own arithmetic."""

import collections
import statistics

import numpy as np
import pytest

from data.listops import (
    OPERATORS,
    SYMBOLS,
    ListOpsSpec,
    decode,
    encode,
    evaluate,
    listops_examples,
    make_listops,
)

FROZEN_SAMPLE = ("[SM 8 [SM 8 1 2 ] ]", 9)
SMALL = ListOpsSpec(min_length=10, max_length=60)


def python_value(text):
    """By translation into nested calls."""
    functions = {
        "MIN": lambda *v: min(v),
        "MAX": lambda *v: max(v),
        "MED": lambda *v: int(statistics.median(v)),
        "SM": lambda *v: sum(v) % 10,
    }
    words = [
        f"{w[1:]}(" if w in OPERATORS else "), " if w == "]" else f"{w}, " for w in text.split()
    ]
    return eval("".join(words).rstrip(", "), functions)


@pytest.mark.parametrize(
    "text,value",
    [
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),  # the example of the paper
        ("[MED 1 2 3 4 ]", 2),
        ("[MED 5 9 0 ]", 5),
        ("[SM 9 8 ]", 7),
        ("[SM [MAX 1 5 ] [MIN 8 6 ] [MED 0 9 ] ]", 5),
        ("( ( ( [MAX 3 ) 4 ) ] )", 4),
        ("7", 7),
    ],
)
def test_values_by_hand(text, value):
    assert evaluate(encode(text)) == value


def test_values_equal_python_s():
    for index in range(60):
        tokens, label = make_listops(SMALL, "train", index)
        assert label == python_value(decode(tokens))
        assert (encode(decode(tokens)) == tokens).all()


def test_samples_have_the_arena_s_lengths_depths_and_operators():
    spec = ListOpsSpec()
    for index in range(25):
        tokens, label = make_listops(spec, "train", index)
        assert 500 < len(tokens) < 2000 and 0 <= label < 10
        assert python_value(decode(tokens)) == label
        depth = deepest = 1
        arguments, counts = [], []
        for symbol in decode(tokens).split():
            if symbol == "]":
                counts.append(arguments.pop())
                depth -= 1
                continue
            if arguments:
                arguments[-1] += 1
            if symbol in OPERATORS:
                arguments.append(0)
                depth += 1
            deepest = max(deepest, depth)
        assert deepest <= 10 and 2 <= min(counts) and max(counts) <= 10


def test_symbols_come_as_often_as_the_grammar_says():
    spec = ListOpsSpec(min_length=0, max_length=100, max_depth=2, max_args=10)
    symbols = collections.Counter()
    arguments = []
    for index in range(2000):
        tokens, _ = make_listops(spec, "test", index)
        symbols.update(decode(tokens).split())
        if len(tokens) > 1:
            arguments.append(len(tokens) - 2)
    # A quarter of the roots are operators: Binomial(2000, 1/4), standard deviation 19.4.
    assert abs(len(arguments) - 500) < 4 * 19.4
    assert np.mean(arguments) == pytest.approx(6, abs=4 * 2.6 / 500**0.5)  # uniform on 2 ... 10
    operators = np.array([symbols[o] for o in OPERATORS])
    assert np.abs(operators - len(arguments) / 4).max() < 4 * 10
    digits = np.array([symbols[d] for d in "0123456789"])
    assert np.abs(digits - digits.sum() / 10).max() < 4 * (digits.sum() * 0.09) ** 0.5


def test_a_sample_is_a_function_of_seed_split_and_index():
    def digest(*place, spec=SMALL):
        return make_listops(spec, *place)[0].tobytes()

    assert digest("train", 3) == digest("train", 3)
    others = {
        digest("train", 4),
        digest("val", 3),
        digest("train", 3, spec=ListOpsSpec(10, 60, seed=1)),
    }
    assert digest("train", 3) not in others
    tokens, label = make_listops(ListOpsSpec(5, 12), "train", 0)
    # A change here makes other samples of old seeds: raise data.listops.VERSION.
    assert (decode(tokens), label) == FROZEN_SAMPLE


def test_refusals():
    for text in ("[MAX 1", "1 2", "[MAX ]", "] 1"):
        with pytest.raises(ValueError, match="expression must be"):
            evaluate(encode(text))
    with pytest.raises(ValueError, match="got '\\[AVG'"):
        encode("[AVG 1 2 ]")
    with pytest.raises(ValueError, match="split must be one of"):
        make_listops(SMALL, "dev", 0)
    with pytest.raises(ValueError, match="index must not be negative"):
        make_listops(SMALL, "train", -1)
    with pytest.raises(ValueError, match="at least 2"):
        ListOpsSpec(max_args=1)
    with pytest.raises(ValueError, match="room between"):
        ListOpsSpec(min_length=9, max_length=10)
    assert len(SYMBOLS) == 16, "15 symbols and padding"


def test_samples_are_the_same_for_any_number_of_workers(monkeypatch):
    monkeypatch.setattr("data.listops._PART_SAMPLES", 2)
    spec = ListOpsSpec(min_length=3, max_length=40)
    here, there = (list(listops_examples(spec, "val", 5, workers=n)) for n in (0, 2))
    assert [(a.tolist(), label) for a, label in here] == [(b.tolist(), n) for b, n in there]
    assert [(a.tolist(), n) for a, n in here] == [
        (a.tolist(), n) for a, n in (make_listops(spec, "val", i) for i in range(5))
    ]
