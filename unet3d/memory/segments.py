"""How CUDA's caching allocator lays tensors out: what it reserves for what is allocated.

The allocator keeps freed memory and hands it out again. Where a request fits into no gap it takes
more from the device, so it reserves more than is ever allocated at once. This follows its rules
with expandable segments, which unet3d asks for: one range of addresses for small requests and one
for large ones, which grow at their end; the smallest gap that is large enough is taken, and what is
left of it stays a gap (``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch).
"""

import bisect

ROUNDING_BYTES = 512
"""Requests are rounded up to a multiple of this."""
MAX_SMALL_BYTES = 1024**2
"""Larger requests come from the range of large ones."""
SMALL_PAGE_BYTES = 2 * 1024**2
"""Step by which the range of small requests grows."""
LARGE_PAGE_BYTES = 20 * 1024**2
"""Step by which the range of large requests grows."""


def rounded(num_bytes: int) -> int:
    """Return what the allocator hands out for a request.

    Args:
        num_bytes: The size of the request.
    """
    return -(-num_bytes // ROUNDING_BYTES) * ROUNDING_BYTES


class Segments:
    """The memory that the allocator has reserved on one device, for one stream."""

    def __init__(self) -> None:
        self._small = _Range(SMALL_PAGE_BYTES)
        self._large = _Range(LARGE_PAGE_BYTES)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that have been taken from the device."""
        return self._small.reserved_bytes + self._large.reserved_bytes

    def allocate(self, num_bytes: int) -> tuple[bool, int]:
        """Find memory for a request.

        Args:
            num_bytes: Its rounded size, above 0.

        Returns:
            The place, for :meth:`free`.
        """
        is_large = num_bytes > MAX_SMALL_BYTES
        return is_large, (self._large if is_large else self._small).allocate(num_bytes)

    def trim(self) -> None:
        """Give back to the device what nothing uses, as ``torch.cuda.empty_cache`` does."""
        self._small.trim()
        self._large.trim()

    def free(self, place: tuple[bool, int], num_bytes: int) -> None:
        """Take memory back.

        Args:
            place: Where the memory is.
            num_bytes: Its size when it was allocated.
        """
        is_large, address = place
        (self._large if is_large else self._small).free(address, num_bytes)


class _Range:
    """Addresses from 0 on, of which pages are taken from the device as they are used."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._pages: set[int] = set()
        """Numbers of the pages that are reserved."""
        self._end = 0
        """The address after the last one that was ever used."""
        self._gaps: list[tuple[int, int]] = []
        """Address and size of each gap, in the order of addresses; no two gaps touch."""

    @property
    def reserved_bytes(self) -> int:
        return len(self._pages) * self._page_bytes

    def allocate(self, num_bytes: int) -> int:
        # The gap at the end can grow, so it counts as larger than every other.
        fitting = [gap for gap in self._gaps if gap[1] >= num_bytes and sum(gap) != self._end]
        if fitting:
            address, size = min(fitting, key=lambda gap: (gap[1], gap[0]))
            self._gaps.remove((address, size))
        else:
            has_last = bool(self._gaps) and sum(self._gaps[-1]) == self._end
            address, size = self._gaps.pop() if has_last else (self._end, 0)
            self._end = max(self._end, address + num_bytes)
            size = self._end - address
        if size > num_bytes:
            bisect.insort(self._gaps, (address + num_bytes, size - num_bytes))
        last = -(-(address + num_bytes) // self._page_bytes)
        self._pages.update(range(address // self._page_bytes, last))
        return address

    def free(self, address: int, num_bytes: int) -> None:
        index = bisect.bisect(self._gaps, (address, 0))
        if index < len(self._gaps) and self._gaps[index][0] == address + num_bytes:
            num_bytes += self._gaps.pop(index)[1]
        if index and sum(self._gaps[index - 1]) == address:
            before, size = self._gaps.pop(index - 1)
            address, num_bytes = before, size + num_bytes
        bisect.insort(self._gaps, (address, num_bytes))

    def trim(self) -> None:
        for address, size in self._gaps:
            first, last = -(-address // self._page_bytes), (address + size) // self._page_bytes
            if address + size == self._end:
                last = max(self._pages, default=-1) + 1
            self._pages.difference_update(range(first, last))
