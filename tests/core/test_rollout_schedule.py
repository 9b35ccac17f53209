"""Whatever ends when: every request runs once, in one row at a time, and the live rows fit the bucket that runs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import rollouts
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_portable.rollout.family import read
from grpo_portable.rollout.kv import Cache, runs
from grpo_portable.rollout.schedule import bucket_of, plan, row_buckets


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    n=st.integers(1, 9),
    capacity=st.integers(1, 20),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_every_request_runs_once(lengths: list[int], n: int, capacity: int, data: st.DataObject) -> None:
    schedule, buckets = plan(lengths, n, capacity), row_buckets(capacity)
    started: list[int] = []
    for _ in range(10_000):
        if schedule.done:
            break
        due, admitted = schedule.due, schedule.admit()
        assert due == bool(admitted)
        for part, rows in admitted:
            assert len(part.requests) == len(rows) and all(r // n == part.prompt for r in part.requests)
            assert [schedule.owner[row] for row in rows] == list(part.requests)
            started += part.requests
        live = schedule.live
        assert live and schedule.bucket(buckets) > live[-1]
        ended = data.draw(st.lists(st.sampled_from(live), unique=True)) or [live[0]]
        left = {schedule.owner[row] for row in live if row not in ended}
        schedule.release(ended)
        for source, target in schedule.compact(buckets):
            assert target < source and schedule.owner[source] is None
        assert {schedule.owner[row] for row in schedule.live} == left
    assert sorted(started) == list(range(len(lengths) * n))


def test_the_longest_prompts_start_first() -> None:
    schedule = plan([3, 9, 5], 2, 6)
    assert [part.prompt for part, _ in schedule.admit()] == [1, 2, 0]


def test_a_group_wider_than_the_rows_is_split() -> None:
    schedule = plan([4], 10, 4)
    sizes = []
    while not schedule.done:
        sizes += [len(part.requests) for part, _ in schedule.admit()]
        schedule.release(schedule.live)
    assert sizes == [4, 4, 2]


def test_rows_close_up_once_a_smaller_bucket_holds_them() -> None:
    schedule, buckets = plan([1], 16, 16), row_buckets(16)
    schedule.admit()
    schedule.release([0, 3])
    assert schedule.compact(buckets) == []  # fourteen rows still need sixteen
    schedule.release([1, 2, 4, 5, 6, 7])
    assert schedule.compact(buckets) == list(zip(range(8, 16), range(8), strict=True))
    assert schedule.bucket(buckets) == 8


@pytest.mark.parametrize("capacity", [1, 2, 7, 8, 30, 64, 100, 256, 1000])
def test_buckets_reach_the_capacity_in_small_steps(capacity: int) -> None:
    buckets = row_buckets(capacity)
    assert buckets[-1] == capacity and list(buckets) == sorted(set(buckets))
    assert all(b <= max(2 * a, a + 8) and (b <= 1.25 * a or a < 40) for a, b in itertools.pairwise(buckets))
    assert all(bucket_of(rows, buckets) >= rows for rows in range(1, capacity + 1))


def test_rows_of_one_prompt_read_it_from_the_lowest_of_them() -> None:
    schedule = plan([5, 5], 3, 6)
    schedule.admit()
    assert schedule.leaders(3) == [0, 0, 0, 3, 3, 3]
    schedule.release([0, 4])
    assert schedule.leaders(3) == [0, 1, 1, 3, 4, 3]
    assert schedule.holders(3) == {0: 1, 1: 3}


def test_copies_of_one_row_into_neighbours_are_one_copy() -> None:
    assert runs([0, 0, 0, 4, 4], [1, 2, 5, 6, 7]) == [(0, 1, 2), (0, 5, 1), (4, 6, 2)]
    assert runs([9, 8], [0, 1]) == [(9, 0, 1), (8, 1, 1)] and runs([], []) == []


@pytest.mark.parametrize(("head_dim", "dtype"), [(4, torch.bfloat16), (3, torch.bfloat16), (3, torch.float32)])
def test_a_copied_row_holds_the_span_and_nothing_else_moves(head_dim: int, dtype: torch.dtype) -> None:
    shape = replace(read(rollouts.model("llama")).shape, layers=2, kv_heads=1, head_dim=head_dim)
    cache = Cache(shape, 4, 6, torch.device("cpu"), dtype)
    cache.all.copy_(torch.arange(cache.all.numel()).view_as(cache.all) % 101)
    before = cache.all.clone()
    cache.copy([3, 3], [0, 1], 5)
    assert torch.equal(cache.all[:, :2, :5], before[:, 3:, :5].expand(-1, 2, -1, -1, -1))
    assert torch.equal(cache.all[:, :2, 5:], before[:, :2, 5:]) and torch.equal(cache.all[:, 2:], before[:, 2:])
