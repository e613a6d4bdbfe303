"""The merge window by itself; what several workers do with it is in tests/jobs."""

import pytest
import torch

from fleetx import window


def test_where_a_device_would_have_to_be_waited_for_items_are_asked_about_one_window_later(monkeypatch):
    monkeypatch.setattr(window, "is_at_hand", lambda _tensor: False)
    one = window.Window(list)
    one._check_others(*map(torch.tensor, (2.0, 2.0, 0.0)))  # the first of a layout, at once
    one._check_others(*map(torch.tensor, (2.0, 0.0, 0.0)))
    one._check_others(*map(torch.tensor, (2.0, 1.0, 0.0)))
    with pytest.raises(ValueError, match="1 of 2 workers gave items= to minimize"):
        one._check_others(*map(torch.tensor, (2.0, 2.0, 0.0)))


def test_where_nobody_has_to_wait_items_are_asked_about_at_once():
    one = window.Window(list)
    one._check_others(*map(torch.tensor, (2.0, 2.0, 0.0)))
    with pytest.raises(ValueError, match="1 of 2 workers gave items= to minimize"):
        one._check_others(*map(torch.tensor, (2.0, 1.0, 0.0)))
