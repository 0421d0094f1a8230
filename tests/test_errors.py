from fedlens.errors import LISTED, suggest


def test_the_nearest_option_is_suggested() -> None:
    assert suggest("lrr", ["lr", "seed"]) == "did you mean 'lr'?"


def test_options_are_listed_and_of_many_the_first() -> None:
    assert suggest("x", ["seed", "lr"]) == "choose from lr, seed."
    many = [f"option {number:02}" for number in range(LISTED + 5)]
    message = suggest("x", many)
    assert message.endswith(f"option {LISTED - 1:02} and 5 more.")
