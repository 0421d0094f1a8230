import torch

from fedlens import params


def test_digest_sees_every_bit_name_type_and_shape() -> None:
    base = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2, 2)}
    same = {"b": torch.zeros(2, 2), "a": torch.tensor([1.0, 2.0])}
    assert params.digest(base) == params.digest(same)
    flipped = torch.tensor([1.0, 2.0]).view(torch.int32)
    flipped[0] ^= 1
    others = [
        {**base, "a": flipped.view(torch.float32)},
        {**base, "a": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {**base, "b": torch.zeros(4)},
        {"c": base["a"], "b": base["b"]},
        {"a": base["a"]},
        {**base, "b": -torch.zeros(2, 2)},
    ]
    digests = {params.digest(other) for other in others}
    assert len(digests) == len(others)
    assert params.digest(base) not in digests


def test_digest_takes_scalars_empty_tensors_and_views() -> None:
    wide = torch.arange(12.0).view(3, 4)
    assert params.digest({"x": wide.T}) == params.digest({"x": wide.T.contiguous()})
    assert params.digest({"x": torch.tensor(1.0)}) != params.digest({"x": torch.tensor(2.0)})
    params.digest({"x": torch.empty(0)})


def test_mismatch_names_what_differs() -> None:
    expected = {"a": torch.zeros(2), "b": torch.zeros(3)}
    assert params.mismatch(expected, {"a": torch.ones(2), "b": torch.ones(3)}) is None
    message = params.mismatch(expected, {"a": torch.zeros(5), "c": torch.zeros(3)})
    assert message == "missing b; unexpected c; a has shape (5,) instead of (2,)"
    many = {f"p{i}": torch.zeros(1) for i in range(9)}
    assert params.mismatch(many, {}) == "missing p0, p1, p2 and 6 more"
