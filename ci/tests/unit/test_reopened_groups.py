"""Groups that come back after an interruption, with members that have ended elsewhere."""

import pytest

from esgrpo.algo.grouping import CARRIED, FINISHED, PRUNED, GroupCollision, GroupCoordinator


def test_carried_members_join_again_by_number():
    first, second = GroupCoordinator(), GroupCoordinator()
    for _ in range(3):
        first.join("g", 3)
    first.leave("g", 1, FINISHED)
    first.leave("g", 0, CARRIED)
    first.leave("g", 2, CARRIED)
    assert first.groups == {}  # nothing of it runs here any more
    second.reopen("g", 3, {1: FINISHED})
    assert (second.join("g", 3, 2), second.join("g", 3, 0)) == (2, 0)
    second.leave("g", 2, FINISHED)
    second.leave("g", 0, PRUNED)
    assert second.groups == {}


def test_collisions():
    coordinator = GroupCoordinator()
    coordinator.reopen("g", 2, {})
    with pytest.raises(GroupCollision):
        coordinator.reopen("g", 2, {})
    coordinator.join("g", 2, 1)
    with pytest.raises(GroupCollision):
        coordinator.join("g", 2, 1)


def test_a_group_that_came_back_complete_is_not_kept():
    coordinator = GroupCoordinator()
    coordinator.reopen("g", 2, {0: FINISHED, 1: PRUNED})
    assert coordinator.groups == {}
