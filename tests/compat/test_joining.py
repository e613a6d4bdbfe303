"""`fleet.init(role)`, and what it refuses."""

import pytest

from fleetx.compat import fleet, role_maker


def test_alone_it_is_a_world_of_one():
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    fleet.init(role_maker=role_maker.PaddleCloudRoleMaker(is_collective=True))
    fleet.init(is_collective=True)
    fleet.init()
    assert fleet.worker_num() == 1


@pytest.mark.parametrize("arguments", [{}, {"is_collective": False}])
def test_parameter_servers_are_refused(arguments):
    with pytest.raises(ValueError, match=r"is_collective=False\) means parameter servers.*is_collective=True"):
        role_maker.PaddleCloudRoleMaker(**arguments)
    with pytest.raises(ValueError, match="parameter servers, which FleetX does not have"):
        fleet.init(is_collective=False)


@pytest.mark.parametrize(
    ("role", "given"), [("worker", "str"), (True, "bool"), (role_maker.PaddleCloudRoleMaker, "PaddleCloudRoleMaker")]
)
def test_something_else_in_the_place_of_a_role_is_named(role, given):
    with pytest.raises(TypeError, match=rf"PaddleCloudRoleMaker\(is_collective=True\), or nothing; got .*{given}"):
        fleet.init(role)
