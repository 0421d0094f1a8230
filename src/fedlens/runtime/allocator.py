"""The allocator: large blocks stay with the process instead of being mapped afresh at every batch.

glibc gives blocks above 32 MB back to the system as soon as they are freed; the next batch then
pays a page fault for every 4 KB of the same memory again.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGE = 2**30


def keep_large_blocks() -> bool:
    """Tells glibc to keep and reuse them; elsewhere there is nothing to tell, and False."""
    if sys.platform != "linux":
        return False
    try:
        tell = ctypes.CDLL(None).mallopt
    except AttributeError:  # another libc, such as musl
        return False
    return bool(tell(M_MMAP_THRESHOLD, LARGE) and tell(M_TRIM_THRESHOLD, LARGE))
