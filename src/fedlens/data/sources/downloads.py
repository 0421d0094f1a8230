"""Whether a server answers: a missing network is reported in seconds, not after many retries."""

import urllib.error
import urllib.request
from threading import Thread

TIMEOUT_S = 8.0  # so that the user reads a sentence within ten seconds


def unreachable(url: str, timeout: float = TIMEOUT_S) -> str | None:
    """Why the server does not answer, or None if it does.

    The question is asked in a thread, since no timeout covers the search for the server's address.
    """
    answer: list[str | None] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")
            urllib.request.urlopen(request, timeout=timeout).close()
            answer.append(None)
        except urllib.error.HTTPError:
            answer.append(None)  # it refuses this question, so it is there
        except Exception as error:  # a thread has nobody to report to
            answer.append(str(getattr(error, "reason", error)))

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout + 1)
    return answer[0] if answer else f"no answer within {timeout:g} seconds"
