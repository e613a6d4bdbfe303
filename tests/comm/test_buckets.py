from hypothesis import given
from hypothesis import strategies as st

from fleetx.comm.buckets import lay_out


@given(
    items=st.lists(st.tuples(st.integers(0, 40), st.sampled_from("ab")), min_size=1, max_size=40),
    limit=st.integers(0, 60),
    last_limit=st.integers(0, 20),
)
def test_every_item_travels_once_with_its_kind_and_within_the_limit(items, limit, last_limit):
    sizes, kinds = [size for size, _ in items], [kind for _, kind in items]
    buckets = lay_out(sizes, kinds, limit=limit, last_limit=last_limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(items)))
    for bucket in buckets:
        assert bucket == sorted(bucket)
        assert len({kinds[index] for index in bucket}) == 1
        total = sum(sizes[index] for index in bucket)
        assert total <= max(limit, last_limit) or len(bucket) == 1
    # They become complete in the order in which they are sent.
    assert [bucket[-1] for bucket in buckets] == sorted(bucket[-1] for bucket in buckets)
    last = buckets[-1]
    assert sum(sizes[index] for index in last) <= last_limit or len(last) == 1


def test_a_limit_of_zero_gives_each_its_own():
    assert lay_out([4, 4, 4], ["f"] * 3, limit=0, last_limit=0) == [[0], [1], [2]]


def resnet50_sizes():
    """Bytes of ResNet-50's fp32 gradients, in the order of its layers."""
    convolutions = [(3 * 49, 64)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions += [(channels, width), (width * 9, width), (width, width * 4)]
            convolutions += [(channels, width * 4)] if block == 0 else []
            channels = width * 4
    # Each convolution is followed by a batch norm with two parameters per channel; a linear layer ends it.
    counts = [count for fan_in, out in convolutions for count in (fan_in * out, out, out)]
    return [4 * count for count in [*counts, 2048 * 1000, 1000]]


def test_the_guides_figure_161_gradients_in_5_messages():
    sizes = resnet50_sizes()
    assert (len(sizes), sum(sizes) // 4) == (161, 25_557_032)
    mib = 2**20
    assert len(lay_out(sizes[::-1], ["f"] * 161, limit=32 * mib, last_limit=mib)) == 5
