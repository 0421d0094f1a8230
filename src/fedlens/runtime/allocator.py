"""Keep large memory blocks in the process instead of mapping them again for every batch.

glibc returns blocks above 32 MB to the system as soon as they are freed; the next batch then pays
one page fault per 4 KB for the same memory.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGE = 2**30


def keep_large_blocks() -> bool:
    """Configure glibc to keep and reuse large blocks; False on other systems."""
    if sys.platform != "linux":
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:  # another libc, such as musl
        return False
    return bool(set_option(M_MMAP_THRESHOLD, LARGE) and set_option(M_TRIM_THRESHOLD, LARGE))
