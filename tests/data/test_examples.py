import doctest
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fedlens import rng
from fedlens.data import examples as module
from fedlens.data.examples import (
    Examples,
    FeatureExamples,
    ImageExamples,
    TensorExamples,
    as_examples,
    in_order,
    shuffled,
)
from fedlens.data.images import Images
from fedlens.data.transforms import (
    Augmentation,
    Pipeline,
    crop_and_flip,
    resize,
    resize_weights,
)
from fedlens.errors import FedlensError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)
EVERYTHING = Augmentation(crop_padding=4, flip=True, colour_jitter=0.4, randaugment=2)


def some_images(count: int = 20, size: int = 32) -> Images:
    draw = rng.generator(0, "test images")
    pixels = torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=draw)
    return Images(pixels, torch.randint(100, (count,), generator=draw))


@st.composite
def crops(draw: st.DrawFn) -> tuple[torch.Tensor, int, list[int], list[int], list[bool]]:
    count, height, width = draw(st.tuples(*[st.integers(1, 5)] * 3))
    padding = draw(st.integers(0, 4))
    offsets = st.lists(st.integers(0, 2 * padding), min_size=count, max_size=count)
    flips = st.lists(st.booleans(), min_size=count, max_size=count)
    pixels = torch.arange(count * 3 * height * width) % 251 + 1  # no black, which is the padding
    pixels = pixels.to(torch.uint8).view(count, 3, height, width)
    return pixels, padding, draw(offsets), draw(offsets), draw(flips)


@settings(deadline=None, max_examples=60)
@given(crops())
def test_crop_and_flip_is_the_obvious_loop(
    case: tuple[torch.Tensor, int, list[int], list[int], list[bool]],
) -> None:
    pixels, padding, tops, lefts, flips = case
    expected = torch.zeros_like(pixels)
    _, _, height, width = pixels.shape
    for image, (top, left, flip) in enumerate(zip(tops, lefts, flips, strict=True)):
        for row in range(height):
            for column in range(width):
                source = row + top - padding, column + left - padding
                if 0 <= source[0] < height and 0 <= source[1] < width:
                    target = width - 1 - column if flip else column
                    expected[image, :, row, target] = pixels[image, :, source[0], source[1]]
    found = crop_and_flip(pixels, padding, *map(torch.tensor, (tops, lefts, flips)))
    assert torch.equal(found, expected)


def test_crop_and_flip_by_hand() -> None:
    image = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).expand(2, 3, 2, 2)
    corner, shifted = torch.tensor([0, 1]), torch.tensor([0, 2])
    found = crop_and_flip(image, 1, corner, shifted, torch.tensor([0, 1]))
    assert found[0, 0].tolist() == [[0, 0], [0, 1]]
    assert found[1, 0].tolist() == [[0, 2], [0, 4]]


def test_crops_reach_every_offset_and_flips_both_sides() -> None:
    pixels = torch.zeros(600, 3, 5, 5, dtype=torch.uint8)
    pixels[:, :, 2, 2] = 255
    moved = Augmentation(crop_padding=1)(pixels, rng.generator(0, "crop"))
    assert len({tuple(place) for place in moved[:, 0].nonzero()[:, 1:].tolist()}) == 9
    pixels = pixels.roll(1, 3)
    mirrored = Augmentation(flip=True)(pixels, rng.generator(0, "flip"))
    assert 240 < int((mirrored[:, 0, 2, 1] > 0).sum()) < 360


@pytest.mark.parametrize("resolution", [16, 31, 96, 160, 224])
def test_resize_is_torchs_antialiased_bicubic(resolution: int) -> None:
    images = torch.randn(4, 3, 32, 32, generator=rng.generator(0, "resize"))
    size = (resolution, resolution)
    for reference, tolerance in (
        (images.double(), 5e-6),
        (images, 5e-5),
    ):  # its weights are rounded
        expected = F.interpolate(
            reference, size, mode="bicubic", antialias=True, align_corners=False
        )
        found = resize(images, resolution)
        torch.testing.assert_close(found, expected.float(), atol=tolerance, rtol=0)
    ones = torch.ones(resolution)
    torch.testing.assert_close(resize_weights(32, resolution, images.device).sum(1), ones)


def test_resize_of_images_that_are_not_square() -> None:
    images = torch.randn(2, 3, 20, 28, generator=rng.generator(0, "resize"))
    expected = F.interpolate(images, (40, 40), mode="bicubic", antialias=True, align_corners=False)
    torch.testing.assert_close(resize(images, 40), expected, atol=1e-5, rtol=0)


def test_resize_keeps_full_precision_under_autocast() -> None:
    images = torch.randn(2, 3, 32, 32, generator=rng.generator(0, "resize"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = resize(images, 48)
    assert torch.equal(found, resize(images, 48))


def test_normalise_by_hand_where_nothing_is_to_resize() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1).expand(2, 3, 32, 32)
    found = Pipeline(32, MEAN, STD)(pixels)
    assert found.dtype == torch.float32
    expected = torch.tensor([(0 - 0.5) / 0.2, (0.2 - 0.4) / 0.25, (1 - 0.3) / 0.5])
    torch.testing.assert_close(found, expected.view(1, 3, 1, 1).expand(2, 3, 32, 32))


def test_normalising_first_equals_resizing_first() -> None:
    pixels = some_images().pixels
    resized = F.interpolate(pixels / 255, (96, 96), mode="bicubic", antialias=True)
    mean, std = torch.tensor([MEAN, STD]).view(2, 3, 1, 1)
    torch.testing.assert_close(
        Pipeline(96, MEAN, STD)(pixels), (resized - mean) / std, atol=2e-5, rtol=0
    )


@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(crop_padding=4),
        Augmentation(flip=True),
        Augmentation(colour_jitter=0.4),
        Augmentation(randaugment=2),
        EVERYTHING,
    ],
)
def test_a_batch_is_a_function_of_its_draw(augmentation: Augmentation) -> None:
    images = some_images()
    examples = ImageExamples(images, None, Pipeline(48, MEAN, STD, augmentation))
    index, before, stored = torch.arange(20), torch.get_rng_state(), images.pixels.clone()
    batches = [examples.batch(index, rng.generator(seed, "augment")) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(images.pixels, stored)
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    assert not torch.equal(batches[0], examples.batch(index))
    assert batches[0].shape == (20, 3, 48, 48)


def test_colour_draws_differ_within_a_batch() -> None:
    same = some_images(1).pixels.expand(16, 3, 32, 32)
    jittered = Augmentation(colour_jitter=0.5)(same, rng.generator(0, "augment"))
    assert len(jittered.unique(dim=0)) == 8


def test_evaluation_has_no_randomness() -> None:
    images = some_images()
    augmented = ImageExamples(images, None, Pipeline(32, MEAN, STD, EVERYTHING))
    plain = ImageExamples(images, None, Pipeline(32, MEAN, STD))
    before = torch.get_rng_state()
    assert torch.equal(augmented.batch(torch.arange(20)), plain.batch(torch.arange(20)))
    assert torch.equal(
        plain.batch(torch.arange(20), rng.generator(0, "x")), plain.batch(torch.arange(20))
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_active_says_whether_there_is_any_augmentation() -> None:
    assert not Augmentation().active
    assert Augmentation(flip=True).active
    assert EVERYTHING.active


def test_a_subset_is_an_index_not_a_copy() -> None:
    images = some_images()
    whole = ImageExamples(images, None, Pipeline(48, MEAN, STD))
    subset = torch.tensor([7, 3, 11])
    part: Examples = ImageExamples(images, subset, Pipeline(48, MEAN, STD))
    assert len(part) == 3
    assert part.labels.tolist() == images.labels[subset].tolist()
    assert torch.equal(whole.labels, images.labels)
    torch.testing.assert_close(part.batch(torch.tensor([2, 0])), whole.batch(torch.tensor([11, 7])))
    assert isinstance(part, ImageExamples)
    assert part.images.pixels.data_ptr() == images.pixels.data_ptr()


def test_feature_examples_are_what_they_hold() -> None:
    features = torch.arange(12.0).view(4, 3)
    examples: Examples = FeatureExamples(features, torch.arange(4))
    assert len(examples) == 4
    found = examples.batch(torch.tensor([3, 1]), rng.generator(0, "augment"))
    assert torch.equal(found, features[[3, 1]])
    with pytest.raises(ValueError):
        FeatureExamples(features, torch.arange(5))


@given(count=st.integers(0, 50), batch_size=st.integers(1, 60))
def test_passes_meet_every_example_once(count: int, batch_size: int) -> None:
    for batches in (
        shuffled(count, batch_size, rng.generator(0, "order")),
        in_order(count, batch_size),
    ):
        assert sorted(i for batch in batches for i in batch.tolist()) == list(range(count))
        assert all(len(batch) == batch_size for batch in batches[:-1])
        assert all(0 < len(batch) <= batch_size for batch in batches)
    assert [i for batch in batches for i in batch.tolist()] == list(range(count))


def test_order_is_addressed() -> None:
    def order(epoch: int) -> list[int]:
        return torch.cat(shuffled(40, 7, rng.generator(0, "order", epoch))).tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_tensor_examples_are_taken_as_they_are() -> None:
    inputs = torch.arange(24, dtype=torch.uint8).view(4, 2, 3)
    examples: Examples = TensorExamples(inputs, torch.arange(4))
    found = examples.batch(torch.tensor([3, 1]), rng.generator(0, "augment"))
    assert found.dtype == torch.uint8
    assert torch.equal(found, inputs[[3, 1]])
    moved = FeatureExamples(torch.rand(4, 2), torch.arange(4)).to(torch.device("cpu"))
    assert isinstance(moved, FeatureExamples)


def test_as_examples_of_tensors_arrays_datasets_and_examples() -> None:
    inputs, labels = torch.rand(4, 2), torch.tensor([1, 0, 1, 2])
    pairs = [(x, int(y)) for x, y in zip(inputs, labels, strict=True)]
    forms = [
        (inputs, labels),
        (inputs.numpy(), labels.numpy().astype("uint8")),
        (inputs, labels.tolist()),
        torch.utils.data.TensorDataset(inputs, labels),
        pairs,
        tuple(pairs),
    ]
    for form in forms:
        examples = as_examples(form)  # type: ignore[arg-type]
        assert examples.labels.dtype == torch.int64
        assert torch.equal(examples.labels, labels)
        assert torch.equal(examples.batch(torch.arange(4)), inputs)
        assert as_examples(examples) is examples
    assert len(as_examples((pairs[0], pairs[1]))) == 2


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ((torch.rand(4, 2), [0, 1]), "as many labels as inputs"),
        (torch.rand(4, 2), "it has no labels): give (inputs, labels)"),
        ([(torch.rand(2), 0), (torch.rand(3), 1)], "tensors of one shape"),
        (7, "data of type int cannot be used"),
    ],
)
def test_other_data_are_refused_in_a_sentence(data: object, sentence: str) -> None:
    with pytest.raises(FedlensError, match=re.escape(sentence)):
        as_examples(data)  # type: ignore[arg-type]


def test_the_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(module, raise_on_error=True).attempted > 0
