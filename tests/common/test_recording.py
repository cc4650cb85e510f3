"""Graphs of functions recorded on tensors without values: what they give for others, and what is refused."""

import pytest
import torch
from torch import nn

from hf_specx.common.recording import Unrecorded, conditions, record


ONES = torch.ones(4)


class Model(nn.Module):
    """Writes into a buffer that it is given, and reads a tensor that is no parameter."""

    def __init__(self, act=lambda model, x: x):
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), act
        self.register_buffer("scale", torch.tensor(2.0))
        self.table = torch.arange(12.0).view(3, 4)

    def forward(self, x, stored, number):
        first, second = self.linear(x).chunk(2, -1)
        stored[:, 1:3] = first.T[:, :2]
        states = torch.cat([second, first.mul_(self.scale)], -1) @ self.table.T
        return self.act(self, stored.cumsum(1)), None, 1 - states.max(-1)[0].add(2 ** states[0, 0], alpha=number) ** 2


def recorded(model, *given):
    graph, _, whole = record(Model.forward, (model, *given), {}, model, nn.Linear)
    return whole(graph)


def inputs():
    return torch.randn(3, 4), torch.randn(2, 4), 3


@torch.no_grad()
def test_a_graph_gives_for_other_tensors_what_the_forward_gives():
    """The model's own are read in each call, and what is written in place is."""
    model = Model()
    call = recorded(model, *inputs())
    for _ in range(2):
        x, stored, number = inputs()
        ours, theirs = stored.clone(), stored.clone()
        found, expected = call(model, x, ours, number), model(x, theirs, number)
        assert found[1] is None
        torch.testing.assert_close([found[0], found[2], ours], [expected[0], expected[2], theirs])
        model.linear.weight, model.table = nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4)


def branches(model, x):
    return x if x.sum() > 0 else -x


def switches(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.T


def leaves_a_tensor(model, x):
    model.scale = x.sum()
    return x * model.scale


def leaves_a_tensor_and_fails(model, x):
    model.seen = x
    return branches(model, x)


def counts(model, x):
    model.count = getattr(model, "count", 0) + 1
    return x * model.count


def reads_from_elsewhere(model, x):
    return x * ONES


def reads_values(model, x):
    return x * model.scale.tolist()


def reads_an_array(model, x):
    return x * torch.from_numpy(model.scale.numpy())


REFUSED = [reads_values, reads_an_array, branches, switches, counts, reads_from_elsewhere]
REFUSED += [leaves_a_tensor, leaves_a_tensor_and_fails]


@torch.no_grad()
@pytest.mark.parametrize("act", REFUSED)
def test_what_a_graph_of_functions_would_not_do_is_refused(act):
    """The model is left without tensors that have no values."""
    model = Model(act)
    with pytest.raises((Unrecorded, RuntimeError)):
        recorded(model, *inputs())
    assert model.scale == 2
    assert not hasattr(model, "seen")


@torch.no_grad()
def test_what_else_a_recorded_forward_relies_on():
    x, stored, number = inputs()
    usual = conditions([x, stored, number])
    assert usual == conditions([x + 1, stored + 1, number])
    for others in ([x, stored, 4], [x[:2], stored, number], [x.T, stored, number], [x.double(), stored, number]):
        assert usual != conditions(others)
    with torch.autocast("cpu", torch.bfloat16):
        assert usual != conditions([x, stored, number])


def test_gradients_are_left_to_torch():
    with pytest.raises(Unrecorded):
        recorded(Model(), *inputs())
