"""What this machine is, as far as the speed of computations depends on it. No torch."""

import os
import platform
from pathlib import Path


def processor() -> str:
    """The processor's model name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Those that exist."""
    return os.cpu_count() or 1


def cores_allowed() -> int:
    """Those this process may use; a scheduler may allow fewer than exist."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores()


def load_average() -> float:
    """Threads that compute or wait to, over the last minute; 0 on Windows, which does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0
