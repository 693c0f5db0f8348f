import random

import pytest

from unet3d.memory.segments import LARGE_PAGE_BYTES, SMALL_PAGE_BYTES, Segments, rounded

MIB = 1024**2


def test_small_and_large_requests_have_ranges_of_their_own():
    segments = Segments()
    segments.allocate(512)
    assert segments.reserved_bytes == SMALL_PAGE_BYTES
    segments.allocate(MIB + 512)
    assert segments.reserved_bytes == SMALL_PAGE_BYTES + LARGE_PAGE_BYTES


def test_the_smallest_gap_that_fits_is_taken_and_the_rest_stays_a_gap():
    segments = Segments()
    sizes = [30 * MIB, 2 * MIB, 10 * MIB, 2 * MIB]
    first, _, third, _ = places = [segments.allocate(size) for size in sizes]
    reserved = segments.reserved_bytes
    segments.free(first, sizes[0])
    segments.free(third, sizes[2])
    assert segments.allocate(9 * MIB) == third
    assert segments.allocate(20 * MIB) == first
    assert segments.allocate(10 * MIB) == (True, first[1] + 20 * MIB)
    assert segments.reserved_bytes == reserved
    assert len(set(places)) == 4


def test_the_end_grows_only_by_what_its_gap_lacks():
    segments = Segments()
    place = segments.allocate(20 * MIB)
    segments.free(place, 20 * MIB)
    assert segments.allocate(30 * MIB) == place
    assert segments.reserved_bytes == 40 * MIB


@pytest.mark.parametrize("seed", range(5))
def test_no_two_tensors_overlap_and_all_that_is_freed_is_found_again(seed):
    """Against plain bookkeeping of who has which addresses."""
    chance = random.Random(seed)
    segments, alive = Segments(), dict[tuple[bool, int], int]()
    for _ in range(2000):
        if alive and chance.random() < 0.5:
            place = chance.choice(list(alive))
            segments.free(place, alive.pop(place))
            continue
        size = rounded(chance.choice([100, 5000, MIB, 3 * MIB, 40 * MIB]) + chance.randrange(999))
        is_large, address = place = segments.allocate(size)
        for (kind, other), length in alive.items():
            assert kind != is_large or address + size <= other or other + length <= address
        alive[place] = size
        assert sum(alive.values()) <= segments.reserved_bytes
    for place, size in alive.items():
        segments.free(place, size)
    reserved = segments.reserved_bytes
    whole = (reserved // LARGE_PAGE_BYTES - 1) * LARGE_PAGE_BYTES
    place = segments.allocate(whole)
    assert segments.reserved_bytes == reserved
    segments.free(place, whole)
    segments.trim()
    assert segments.reserved_bytes == 0


def test_what_is_given_back_are_whole_pages_without_tensors():
    segments = Segments()
    places = [segments.allocate(15 * MIB) for _ in range(8)]
    assert segments.reserved_bytes == 120 * MIB
    for index in (1, 2, 3, 4, 7):
        segments.free(places[index], 15 * MIB)
    segments.trim()
    # Pages 1, 2 lie within the first gap, page 3 holds the end of it and the next tensor.
    assert segments.reserved_bytes == 120 * MIB - 2 * LARGE_PAGE_BYTES
    segments.allocate(60 * MIB)
    assert segments.reserved_bytes == 120 * MIB
