import platform

from fedlens.runtime.allocator import keep_large_blocks


def test_glibc_is_told_and_others_are_not() -> None:
    assert keep_large_blocks() == (platform.libc_ver()[0] == "glibc")
