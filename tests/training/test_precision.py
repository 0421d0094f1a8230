import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch

from fedlens.errors import FedlensError
from fedlens.training import precision

CPU = torch.device("cpu")


def test_fp32_is_plain() -> None:
    chosen = precision.choose("fp32", CPU)
    with chosen.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert chosen.scaler is None


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(FedlensError, match="did you mean 'fp32'"):
        precision.choose("fp3", CPU)


@pytest.mark.slow
def test_amp_works_or_is_refused_but_never_kills() -> None:
    """On a CPU whose bfloat16 units are broken the child dies, not the caller."""
    try:
        chosen = precision.choose("amp", CPU)
    except FedlensError as error:
        assert "use precision=fp32" in str(error)
    else:
        with chosen.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_a_child_that_dies_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*args: object, **options: object) -> SimpleNamespace:
        return SimpleNamespace(returncode=-signal.SIGILL, stderr="")

    monkeypatch.setattr(subprocess, "run", dies)
    with pytest.raises(FedlensError, match=r"kills the process with SIGILL.*precision=fp32"):
        precision.choose("amp", CPU)


@pytest.mark.slow
def test_a_child_that_fails_is_quoted() -> None:
    assert "fails" in (precision.probe("nowhere", torch.bfloat16) or "")
