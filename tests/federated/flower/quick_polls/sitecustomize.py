"""Makes a SuperNode look for messages several times a second; Flower's own sleeps 3 s in between.

Python imports this at its start, if this folder is on PYTHONPATH (see `links.quick_polls`).
"""

import sys
import time
from pathlib import Path

if any(Path(word).name == "flower-supernode" for word in sys.orig_argv[:3]):
    _sleep = time.sleep
    time.sleep = lambda seconds: _sleep(min(seconds, 0.5))
