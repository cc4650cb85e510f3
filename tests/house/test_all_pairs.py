"""The helper that chooses cases leaves out no pair of values."""

from itertools import combinations, product

from all_pairs import all_pairs


def test_every_two_values_meet_in_fewer_cases():
    parameters = "abcde", [1, 2, 3], [False, True], ["x", "y", "z"]
    cases = all_pairs(*parameters)
    for (i, first), (j, second) in combinations(enumerate(parameters), 2):
        assert set(product(first, second)) == {(case[i], case[j]) for case in cases}
    assert len(cases) < len(list(product(*parameters))) / 3
    assert cases == all_pairs(*parameters)
