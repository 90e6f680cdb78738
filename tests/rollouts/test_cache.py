"""Slots and pools: what each owner stores stays its own through every move, within the budget."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.errors import EngineError
from palestra.rollouts.native.budget import cache_positions, position_bytes
from palestra.rollouts.native.cache import FIRST_SLOTS, SMALLEST, STRIDE, KVCache, Pool
from palestra.rollouts.native.prefixes import Prefix, PrefixStore
from rollouts.support import Tiny

CPU = torch.device("cpu")


@dataclass(eq=False)
class Owner:
    """Stores ``stored`` positions whose every number is ``mark``."""

    mark: float
    stored: int = 0
    slot: int = field(default=-1)


def pool_of(tiny: Tiny, slots: int, capacity: int = 32) -> Pool[Owner]:
    pool: Pool[Owner] = Pool(tiny.config, capacity, torch.float32, CPU)
    pool.resize(slots)
    return pool


def write(tiny: Tiny, pool: Pool[Owner], owner: Owner, tokens: int) -> None:
    shape = (tokens, tiny.config.kv_heads, tiny.config.head_dim)
    for layer in range(tiny.config.layers):
        keys = torch.full(shape, owner.mark + layer)
        pool.write(layer, owner.slot, owner.stored, keys, -keys)
    owner.stored += tokens


def check(tiny: Tiny, pool: Pool[Owner]) -> None:
    assert [owner.slot for owner in pool.owners] == list(range(len(pool.owners)))
    for owner in pool.owners:
        for layer in range(tiny.config.layers):
            keys, values = pool.read(layer, owner.slot, owner.stored)
            assert (keys == owner.mark + layer).all()
            assert (values == -(owner.mark + layer)).all()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "write", "promote", "leave", "grow", "shrink"]), st.integers(0, 99)
        ),
        max_size=40,
    )
)
def test_whatever_moves_each_owner_keeps_what_it_stored(tiny: Tiny, events: list[tuple[str, int]]) -> None:
    pool = pool_of(tiny, 2)
    decoding: set[int] = set()
    for mark, (event, number) in enumerate(events):
        filling = [owner for owner in pool.owners if id(owner) not in decoding]
        if event == "enter" and len(pool.owners) < pool.slots:
            pool.enter(Owner(float(mark)))
        elif event == "grow" and pool.slots < 12:
            pool.resize(pool.slots + 2)
        elif event == "shrink" and pool.owners:
            pool.resize(len(pool.owners))
        elif event == "promote" and filling:
            chosen = filling[number % len(filling)]
            pool.promote(chosen)
            decoding.add(id(chosen))
        elif pool.owners and event in ("write", "leave"):
            chosen = pool.owners[number % len(pool.owners)]
            if event == "leave":
                pool.leave(chosen)
                decoding.discard(id(chosen))
            elif chosen.stored + 5 <= pool.capacity:
                write(tiny, pool, chosen, 5)
        check(tiny, pool)
        assert {id(owner) for owner in pool.owners[: pool.decoding]} == decoding


def test_a_copy_pasted_elsewhere_is_what_was_stored(tiny: Tiny) -> None:
    pool, other = pool_of(tiny, 2), pool_of(tiny, 1, 64)
    first, second = Owner(3.0), Owner(5.0)
    pool.enter(first)
    pool.enter(second)
    write(tiny, pool, second, 9)
    copy = pool.copied(second.slot, 9)
    assert copy.shape == (2, tiny.config.layers, tiny.config.kv_heads, 9, tiny.config.head_dim)
    pool.leave(second)
    pool.enter(Owner(6.0))
    assert not any(t.any() for t in (*pool.keys, *pool.values)), "a slot that somebody had is wiped"
    guest = Owner(5.0, stored=7)
    other.enter(guest)
    other.paste(guest.slot, copy, 7)
    check(tiny, other)
    assert not other.read(0, guest.slot, 8)[0][:, 7].any()


def test_nothing_of_an_earlier_owner_lies_behind_what_is_stored(tiny: Tiny) -> None:
    pool = pool_of(tiny, 4)
    owners = [Owner(float(i + 1)) for i in range(4)]
    for owner, tokens in zip(owners, (20, 5, 25, 3), strict=True):
        pool.enter(owner)
        write(tiny, pool, owner, tokens)
    pool.promote(owners[3])
    pool.promote(owners[1])
    pool.leave(owners[0])
    check(tiny, pool)
    for owner in pool.owners:
        keys, values = pool.read(0, owner.slot, pool.capacity)
        assert not keys[:, owner.stored :].any()
        assert not values[:, owner.stored :].any()


def test_single_tokens_go_to_their_row_and_position(tiny: Tiny) -> None:
    pool = pool_of(tiny, 3)
    heads, width = tiny.config.kv_heads, tiny.config.head_dim
    keys = torch.arange(3.0)[:, None, None].expand(3, heads, width) + 1
    pool.write_tokens(1, pool.token_places([4, 0, 31]), keys, -keys)
    for row, position in enumerate([4, 0, 31]):
        found, values = pool.read(1, row, 32)
        assert (found[:, position] == row + 1).all()
        assert (values[:, position] == -(row + 1)).all()
        assert found.count_nonzero() == heads * width
    assert not pool.keys[0].any()


def test_growing_copies_what_is_stored_and_leaves_the_rest_zero(tiny: Tiny) -> None:
    pool = pool_of(tiny, 3)
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(9.0)
    owner = Owner(2.0)
    pool.enter(owner)
    write(tiny, pool, owner, 4)
    pool.resize(5)
    check(tiny, pool)
    for tensor in (*pool.keys, *pool.values):
        assert not tensor[: tiny.config.kv_heads, 4:].any()
        assert not tensor[tiny.config.kv_heads :].any()


def cache_of(tiny: Tiny, budget: int, context: int = 1000) -> KVCache[Owner]:
    return KVCache(tiny.config, context=context, budget=budget, dtype=torch.float32)


def test_slots_are_doubles_of_the_smallest_and_never_longer_than_the_context(tiny: Tiny) -> None:
    cache = cache_of(tiny, 10**6)
    sizes = [cache.capacity(n) for n in (1, SMALLEST, SMALLEST + 1, 4 * SMALLEST, 999, 1000)]
    assert sizes == [SMALLEST, SMALLEST, 2 * SMALLEST, 4 * SMALLEST, 1008, 1008]
    assert all(size % STRIDE == 0 for size in sizes)


def test_pools_grow_by_doubling_and_give_free_slots_first(tiny: Tiny) -> None:
    cache = cache_of(tiny, 10**6)
    grown: list[int] = []
    for mark in range(2 * FIRST_SLOTS + 1):
        pool = cache.place(10, 0)
        assert pool is not None
        pool.enter(Owner(float(mark)))
        grown.append(pool.slots)
    assert sorted(set(grown)) == [FIRST_SLOTS, 2 * FIRST_SLOTS, 4 * FIRST_SLOTS]
    assert cache.reserved == 4 * FIRST_SLOTS * SMALLEST
    assert cache.nbytes == cache.reserved * position_bytes(tiny.config, torch.float32)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.booleans(), st.integers(1, 1000)), max_size=30),
    st.integers(0, 500),
)
def test_the_budget_holds_whatever_enters_and_leaves(
    tiny: Tiny, units: int, events: list[tuple[bool, int]], elsewhere: int
) -> None:
    budget = 1008 + units * SMALLEST
    cache = cache_of(tiny, budget)
    inside: list[tuple[Pool[Owner], Owner]] = []
    for enters, tokens in events:
        if enters:
            pool = cache.place(tokens, elsewhere)
            if pool is not None:
                owner = Owner(1.0)
                pool.enter(owner)
                inside.append((pool, owner))
            else:
                used = sum(len(p.owners) * p.capacity for p in cache.pools.values())
                assert used + elsewhere + cache.capacity(tokens) > budget, "idle slots are given up first"
        elif inside:
            pool, owner = inside.pop(tokens % len(inside))
            pool.leave(owner)
        assert cache.reserved + elsewhere <= budget
    for pool, owner in inside:
        pool.leave(owner)
    cache.release()
    assert cache.reserved == cache.nbytes == 0


# -- what sessions keep


def entry(tokens: int) -> Prefix:
    return Prefix(tuple(range(tokens)), torch.zeros(1))


def test_the_longest_common_beginning_is_found_but_never_the_whole_prompt() -> None:
    store = PrefixStore(100)
    kept = entry(5)
    store.keep(("s", ""), kept)
    assert store.find(("s", ""), (0, 1, 2, 9, 9)) == (kept, 3)
    assert store.find(("s", ""), (0, 1, 2, 3, 4, 5)) == (kept, 5)
    assert store.find(("s", ""), (0, 1, 2)) == (kept, 2), "the last prompt token's logits are needed"
    assert store.find(("s", ""), (7, 1)) is None
    assert store.find(("t", ""), (0, 1, 2)) is None
    assert store.find(("s", "adapter"), (0, 1, 2)) is None, "an adapter's keys are its own"


def test_the_sessions_used_longest_ago_go_first_and_the_sum_is_exact() -> None:
    store = PrefixStore(10)
    for name in "abc":
        store.keep((name, ""), entry(3))
    store.find(("a", ""), (0, 1, 2, 3))
    store.keep(("d", ""), entry(4))
    assert [store.find((name, ""), (0, 1)) is not None for name in "abcd"] == [True, False, True, True]
    assert store.held == 10
    store.keep(("a", ""), entry(1))
    assert store.held == 8
    store.keep(("e", ""), entry(11))
    assert store.held == 8
    assert store.find(("e", ""), (0, 1)) is None
    store.shrink(4)
    assert store.held <= 4
    store.clear()
    assert (store.held, len(store)) == (0, 0)


# -- how large


def test_the_budget_follows_the_setting_or_the_machine(tiny: Tiny) -> None:
    each = position_bytes(tiny.config, torch.float32)
    assert cache_positions(tiny.config, torch.float32, CPU, 1, 4, 64) == 1024**2 // each
    assert cache_positions(tiny.config, torch.float32, CPU, 0, 4, 64) == 256
    huge = cache_positions(tiny.config, torch.float32, CPU, 0, 10**12, 64)
    assert 64 < huge < 64 * 10**12


@pytest.mark.parametrize("cache_mb", [-1, 1])
def test_a_cache_that_holds_no_full_context_is_refused(tiny: Tiny, cache_mb: int) -> None:
    with pytest.raises(EngineError, match="a full context has 1000000") as caught:
        cache_positions(tiny.config, torch.float32, CPU, cache_mb, 4, 1_000_000)
    assert "raise engine.cache_mb" in str(caught.value)
