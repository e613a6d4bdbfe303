"""The digits inside the package."""

import pytest

from fleetx.data import load_digits
from fleetx.data.digits import FOLDS


def test_the_folds_test_with_all_digits_and_none_twice():
    folds = [load_digits(fold) for fold in range(FOLDS)]
    everything = load_digits()
    assert sum(len(fold.test_labels) for fold in folds) == 1797
    assert all(len(fold.train_labels) + len(fold.test_labels) == 1797 for fold in folds)
    # The digits are dealt out in turns, so the first five of the file begin one fold each.
    first_of_file = everything.train_images[:4]
    for number in range(4):
        assert folds[number].test_images[0].equal(first_of_file[number])
    assert folds[-1].test_images.equal(everything.test_images)


@pytest.mark.parametrize("fold", [-1, 5, None])
def test_there_are_five_folds(fold):
    with pytest.raises(ValueError, match=f"fold must be from 0 to 4, got {fold}"):
        load_digits(fold)
