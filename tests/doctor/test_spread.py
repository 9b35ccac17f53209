"""One step on several cards: the sums by hand, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest

from doctor import spread as room
from doctor.cards import find_card
from doctor.memory import Sizes
from doctor.shapes import shape_of
from doctor.spread import MEASURED, Measured, arithmetic, exchange_s, most_sharing, nodes, spread
from doctor.what_if import answer

H100 = find_card("H100")[0]


def on(cards: int, questions: int = 8, card: Any = H100) -> room.Spread:
    shape = shape_of("Qwen/Qwen3-4B")
    assert shape is not None
    found = spread(shape, "bf16-hf", card.usable_gib, card, cards, Sizes(prompts_per_step=questions))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("cards", "questions", "used"),
    [(1, 8, 1), (3, 8, 2), (5, 8, 4), (8, 8, 8), (64, 8, 8), (64, 512, 64), (6, 9, 3), (4, 1, 1), (0, 8, 1)],
)
def test_whole_groups_decide_how_many_cards_share_a_step(cards: int, questions: int, used: int) -> None:
    assert most_sharing(cards, questions) == used


def test_a_node_has_eight_cards() -> None:
    assert [nodes(k) for k in (1, 8, 9, 64)] == [1, 1, 2, 8]


def test_the_gradients_way_between_the_cards() -> None:
    """Qwen3-4B, rank 32: 66,060,288 adapter weights, 4 bytes each; a ring of 8 sends 2 x 7/8 of them in 14 rounds."""
    bytes_ = 66_060_288 * 4
    settled = on(8).settled
    assert settled.ledger["gradients"] * 2**30 == pytest.approx(bytes_)
    assert exchange_s(settled, H100, 8) == pytest.approx(bytes_ * 1.75 / 150e9 + 14 * 30e-6)
    assert exchange_s(settled, H100, 1) == 0
    # two nodes: the network is the slowest way; cards without NVLink go through the host
    assert exchange_s(settled, H100, 16) == pytest.approx(bytes_ * 1.875 / 20e9 + 30 * 30e-6)
    assert exchange_s(settled, find_card("RTX 4090")[0], 2) == pytest.approx(bytes_ / 12e9 + 2 * 30e-6)


def test_the_sums_that_are_shown_give_the_seconds_that_are_shown() -> None:
    """0.25 GiB x 1.75 = 0.470 GB at 150 GB/s: 3.1 ms, and 14 rounds of 30 us: 0.4 ms; 0.25 x 1.97 at 20: 26.4 ms, and 3.8."""
    told = " ".join(arithmetic(H100, on(8)))
    assert (
        "0.25 GiB x 1.75 at 150 GB/s between the cards, and 14 rounds of 30 us = 3.5 ms (rates and rounds assumed)"
        in told
    )
    told = " ".join(arithmetic(H100, on(64, 512)))
    assert "0.25 GiB x 1.97 at 20 GB/s between 8 nodes, and 126 rounds of 30 us = 29.8 ms" in told


def test_a_share_is_what_one_card_would_take_for_it() -> None:
    two, one = on(2), on(1)
    assert (two.used, two.settled.setting.rollout_rows, one.settled.setting.rollout_rows) == (2, 32, 64)
    assert two.step_s == pytest.approx(two.share.total_s + two.exchange_s + two.lost_s)
    assert one.times == pytest.approx(1.0)
    assert 1 < two.times <= 2


@pytest.mark.parametrize("cards", [2, 8, 64])
def test_a_step_that_grows_with_the_cards_is_never_more_than_as_many_times_as_fast(cards: int) -> None:
    grown = on(cards, 8 * cards)
    assert grown.used == cards and grown.settled.setting.rollout_rows == 64
    assert grown.times <= cards


def test_what_two_measured_cards_lost_is_counted_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 s on one, 5.5 s on two: a tenth is lost; on 8 cards 3 tenths of the share."""
    assert not MEASURED or all(-0.05 <= m.lost < 1 for m in MEASURED)
    seen = Measured("H200", "a step", 10.0, 5.5, "here")
    assert seen.lost == pytest.approx(0.1)
    monkeypatch.setattr(room, "MEASURED", (seen,))
    eight = on(8)
    assert eight.lost_s == pytest.approx(eight.share.total_s * 0.3)
    said = " ".join(arithmetic(H100, eight))
    assert "10.0 % x log2(8)" in said and "10 s on one, 5.5 s on two" in said
    monkeypatch.setattr(room, "MEASURED", ())
    assert on(8).lost_s == 0 and "best case" in " ".join(arithmetic(H100, on(8)))


@pytest.mark.parametrize("text", ["8x H100", "64x H100"])
def test_what_if_says_both_with_the_sums(text: str) -> None:
    found = answer(text)
    shown, count = found.to_text(), int(text.split("x")[0])
    assert "The same step on several cards:" in shown and "A step that grows with the cards:" in shown
    assert f"{count} cards share {8 * count} questions x 8" in " ".join(shown.split())
    assert all(len(line) <= 80 for line in shown.splitlines())
    same, grown = found.to_json()["several"]
    assert (same["used"], grown["used"], grown["nodes"]) == (8, count, -(-count // 8))
    for said in (same, grown):
        seconds = said["seconds_per_step"]
        total = said["share_of_one_card"] + said["exchange"] + said["lost"]
        assert seconds["estimate"] == pytest.approx(total) and seconds["low"] < total < seconds["high"]
        assert said["memory_each"]["need_gib"] == pytest.approx(sum(said["memory_each"]["ledger"].values()))


def test_one_card_has_nothing_to_share() -> None:
    assert answer("H100").to_json()["several"] == []
