"""Cards: found by the names people and drivers write, unknown ones named with their nearest, numbers in the right order."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor.cards import Card, CardError, cards, find_card


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.name)
def test_every_card_is_found_by_its_own_name(card: Card) -> None:
    for text in (card.name, card.name.lower(), f"NVIDIA {card.name}", f"2x {card.name}"):
        assert find_card(text)[0] == card


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("RTX 4090", "GeForce RTX 4090", 1),
        ("rtx4090", "GeForce RTX 4090", 1),
        ("4090 laptop", "GeForce RTX 4090 Laptop", 1),
        ("NVIDIA GeForce RTX 3070 Laptop GPU", "GeForce RTX 3070 Laptop", 1),
        ("RTX 2080 with Max-Q Design", "GeForce RTX 2080 Laptop", 1),
        ("RTX 4090 24GB", "GeForce RTX 4090", 1),
        ("4070ti super", "GeForce RTX 4070 Ti Super", 1),
        ("RTX 4060 Ti 16GB", "GeForce RTX 4060 Ti 16GB", 1),
        ("RTX 4060 Ti", "GeForce RTX 4060 Ti", 1),
        ("8x H100", "H100", 8),
        ("64 x H100", "H100", 64),
        ("H100x8", "H100", 8),
        ("L4 x 4", "L4", 4),
        ("RTX 4090 x2", "GeForce RTX 4090", 2),
        ("2x RTX 4090", "GeForce RTX 4090", 2),
        ("NVIDIA H100 80GB HBM3", "H100", 1),
        ("NVIDIA H100 PCIe", "H100 PCIe", 1),
        ("A100-SXM4-40GB", "A100 40GB", 1),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", 1),
        ("Tesla V100-SXM2-32GB", "Tesla V100 32GB", 1),
        ("A10G", "A10G", 1),
        ("RTX 6000 Ada Generation", "RTX 6000 Ada", 1),
        ("NVIDIA RTX A6000", "RTX A6000", 1),
        ("Quadro RTX 8000", "Quadro RTX 8000", 1),
        ("RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server", 1),
        ("NVIDIA GH200 480GB", "GH200 96GB", 1),
        ("DGX Spark", "GB10 (DGX Spark)", 1),
        ("Orin (Jetson AGX Orin 64GB)", "Jetson AGX Orin 64GB", 1),
        ("NVIDIA Thor", "Jetson AGX Thor", 1),
    ],
)
def test_names_people_write(text: str, name: str, count: int) -> None:
    found = find_card(text)
    assert (found[0].name, found[1]) == (name, count)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("RTX 9090", "GeForce RTX 4090"),
        ("RTX 6000", "RTX A6000"),
        *((f"RTX {n}", f"nearest: GeForce RTX {n}0") for n in (309, 407, 409, 509)),
        ("RTX 4090 48GB", "GeForce RTX 4090"),
        ("Radeon 7900 XTX", "not a card known here"),
        ("0x H100", "asks for no card"),
        ("999999x B200", "asks for over 9,999 cards"),
        ("2x RTX 4090 + 1x A100", "more than one kind"),
        ("8x", "names no card"),
        ("", "say one as `RTX 4090`"),
        ("gpu", "names no card"),
    ],
)
def test_unknown_cards_are_errors_of_one_line(text: str, says: str) -> None:
    with pytest.raises(CardError, match=re.escape(says)) as error:
        find_card(text)
    assert "\n" not in str(error.value)


@given(st.text(max_size=40))
def test_no_text_breaks_it(text: str) -> None:
    try:
        card, count = find_card(text)
    except CardError:
        return
    assert card in cards() and count >= 1


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.name)
def test_numbers_make_sense(card: Card) -> None:
    assert (6, 0) <= card.pair <= (12, 1)
    assert 0.8 * card.memory_gb <= card.usable_gib <= card.memory_gb
    assert 50 < card.bandwidth_gb_s <= 10_000 and card.source
    if card.bf16_tflops is not None and card.pair >= (7, 0):
        assert 0.02 < card.bf16_tflops / card.bandwidth_gb_s < 0.6


def test_names_and_keys_are_unique() -> None:
    assert len({card.name for card in cards()}) == len({card.key for card in cards()}) == len(cards()) > 100
