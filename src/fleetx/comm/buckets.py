"""Which gradients travel together: a fixed layout, decided once from sizes alone.

A layout that never changes makes sums come out in the same order in every window, so an interrupted run can
continue bit for bit. The last bucket is kept small because nothing is left to hide its transfer behind.
"""

from collections.abc import Hashable, Sequence

MIB = 2**20


def lay_out(sizes: Sequence[int], kinds: Sequence[Hashable], *, limit: int, last_limit: int) -> list[list[int]]:
    """Group items, given in the order in which they become ready, into buckets of at most `limit` bytes.

    Items of different `kinds` (dtype and device) never share a bucket. An item larger than the limit has a
    bucket of its own. Buckets are listed in the order in which they become complete, each with the indices of
    its items in rising order.

    >>> lay_out([4, 4, 4, 1, 1], ["f32"] * 5, limit=8, last_limit=2)
    [[0, 1], [2], [3, 4]]
    """
    buckets = []
    for kind in dict.fromkeys(kinds):
        members = [index for index, its_kind in enumerate(kinds) if its_kind == kind]
        last = _tail(members, sizes, last_limit)
        buckets += _fill(members[: len(members) - len(last)], sizes, limit) + [last]
    return sorted(buckets, key=lambda bucket: bucket[-1])


def _tail(members: list[int], sizes: Sequence[int], limit: int) -> list[int]:
    """The longest run at the end that fits, never empty."""
    total, start = 0, len(members)
    while start > 0 and (total + sizes[members[start - 1]] <= limit or start == len(members)):
        start -= 1
        total += sizes[members[start]]
    return members[start:]


def _fill(members: list[int], sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Buckets filled one after the other."""
    buckets: list[list[int]] = []
    room = 0
    for index in members:
        if not buckets or sizes[index] > room:
            buckets.append([])
            room = limit
        buckets[-1].append(index)
        room -= sizes[index]
    return buckets
