"""Attention of a ragged batch over the paged cache, in plain torch, for any device.

K and V of decoding sequences are gathered from their pages and padded, in a few buckets of similar
length. Prompts are computed one by one: directly from their new K and V if nothing is cached, else
from their pages, a tile of queries at a time. All index tensors and masks are made once per step.

Layers that share a block table (a KV group) share these tensors. Nothing behind a group's window is
read, since blocks there may belong to another sequence by now.

Unwritten slots of a pool may contain anything, even NaN, and 0 times NaN is NaN. So K and V past a
sequence's end or behind its window are cut off or set to zero, not just masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvbaton.engine.cache import KVCache, TokenView
from kvbaton.engine.kv_groups import KVGroup
from kvbaton.engine.models.layers import Heads, LatentHeads, Rotary
from kvbaton.engine.state_blocks import StateBatch
from kvbaton.types import first_attended

BUCKET_ELEMENTS = 1 << 26
"""Maximum number of elements of K that one bucket of decoding sequences gathers."""

TILE_ELEMENTS = 1 << 22
"""Maximum number of elements of the mask for one tile of a prompt's queries."""


@dataclass(frozen=True)
class PagedBatch:
    """The sequences of one step.

    Attributes:
        slots: [groups of K and V, tokens] int64: block * block_size + offset, sequence after
            sequence.
        query_lens: [sequences] int64, number of tokens of each in this step.
        context_lens: [sequences] int64, number of tokens up to the end of this step.
        block_tables: [sequences, groups, blocks] int64, padded with 0.
        last_keys: [tokens] int64, last position that each token attends to, its own or a later one
            of this step; None if it is the own one for all tokens.
    """

    slots: Tensor
    query_lens: npt.NDArray[np.int64]
    context_lens: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int64]
    last_keys: npt.NDArray[np.int64] | None = None


class PagedAttention:
    """`AttentionContext` in plain torch."""

    def __init__(self, cache: KVCache, batch: PagedBatch, states: StateBatch | None = None) -> None:
        self._cache, self.states = cache, states
        views = zip(cache.token_views, batch.slots, strict=True)
        self._rows = [view.token_rows(slots) for view, slots in views]
        groups = enumerate(zip(cache.token_views, cache.groups, strict=False))
        self._parts = [list(_parts(view, batch, g, group)) for g, (view, group) in groups]

    def attend(self, layer: int, heads: Heads, rotary: Rotary | None) -> Tensor:
        """See `AttentionContext.attend`."""
        turned = [heads.query] if heads.key is None else [heads.query, heads.key]
        if heads.norms is not None:
            turned = heads.norms.apply(turned)
        if heads.interleaved:
            turned = [pairs_apart(x) for x in turned]
        if rotary is not None:
            turned = [rotate(x, rotary) for x in turned]
        query, key = turned[0], None if heads.key is None else turned[1]
        return self._attend(layer, Heads(query, key, heads.value, heads.scale, heads.sinks))

    def attend_latent(self, layer: int, heads: LatentHeads, rotary: Rotary) -> Tensor:
        """See `AttentionContext.attend_latent`; computed on latents, which all heads share."""
        query, latent, key_rope, projection = heads
        mla = projection.mla
        turned, key_rope = query[..., mla.nope_dim :], key_rope[:, None]
        if mla.interleaved:
            turned, key_rope = pairs_apart(turned), pairs_apart(key_rope)
        absorbed = projection.absorb(query).transpose(0, 1)
        query = torch.cat((absorbed, rotate(turned, rotary)), dim=-1)
        key = torch.cat((latent[:, None], rotate(key_rope, rotary)), dim=-1)
        value = key[..., : mla.kv_rank]
        sums = self._attend(layer, Heads(query, key, value, mla.scale))
        return projection.values(sums, query.new_empty(*query.shape[:2], mla.value_dim))

    def _attend(self, layer: int, heads: Heads) -> Tensor:
        """`attend` for heads that are rotated."""
        query, key, value, scale, *_ = heads
        group, place = self._cache.places[layer]
        of_key, of_value = self._cache.scales(layer)
        if of_key != 1.0:
            scale = (query.shape[-1] ** -0.5 if scale is None else scale) * of_key
        if key is not None and value is not None:
            key, value = key / of_key, value / of_value
            self._cache.token_views[group].write(place, self._rows[group], key, value)
            key, value = self._cache.kept(key), self._cache.kept(value)
        width = query.shape[-1] if value is None else value.shape[-1]
        out = query.new_empty(*query.shape[:2], width)
        kept = Heads(query, key, value, scale, heads.sinks)
        for part in self._parts[group]:
            part.attend(place, kept, out)
        return out if of_value == 1.0 else out.mul_(of_value)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate ``[tokens, heads, head_dim]``; feature i pairs with i + head_dim / 2."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    sin_first, sin_second = sin.chunk(2, dim=-1)
    out = x * cos
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.addcmul_(second, sin_first, value=-1)
    out_second.addcmul_(first, sin_second)
    return out


def pairs_apart(x: Tensor) -> Tensor:
    """Move features 2i and 2i + 1 to i and i + half, as `rotate` pairs them."""
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)


def attention_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float | None, sinks: Tensor
) -> Tensor:
    """Attention whose softmax, in float32, includes a sink: a logit without a value.

    Args:
        query: [..., heads, queries, head_dim].
        key: [..., heads, keys, head_dim].
        value: Like `key`.
        hidden: True for keys that a query must not see, broadcast to [..., heads, queries, keys].
        scale: Scale of the logits; None for ``head_dim ** -0.5``.
        sinks: float32, broadcast to [..., heads, queries, 1].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = (query @ key.transpose(-1, -2)).float() * scale
    logits.masked_fill_(hidden, -torch.inf)
    logits = torch.cat((logits, sinks.expand(*logits.shape[:-1], 1)), dim=-1)
    return logits.softmax(-1)[..., :-1].to(value.dtype) @ value


class DecodeBucket:
    """Decoding sequences of similar length, with one token each.

    Args:
        cache: The group's view of the pool.
        rows: [sequences] int64, their rows in the batch.
        context_lens: [sequences] int64.
        tables: [sequences, blocks] int64, 0 from the end of each sequence on.
        firsts: [sequences] int64, first token, counted from `tables`, that each attends to.
    """

    def __init__(
        self, cache: TokenView, rows: Tensor, context_lens: Tensor, tables: Tensor, firsts: Tensor
    ) -> None:
        self._cache, self._rows, self._lens = cache, rows, context_lens
        self._pages = cache.page_rows(tables)
        position = torch.arange(tables.shape[1] * cache.block_size, device=rows.device)
        self._hidden = (position >= context_lens[:, None]) | (position < firsts[:, None])
        self._unseen = self._rows_unseen(tables)
        mask = torch.zeros(self._hidden.shape, dtype=cache.compute_dtype, device=rows.device)
        self._mask = mask.masked_fill_(self._hidden, -torch.inf)[:, None, None]

    def attend(self, place: int, heads: Heads, out: Tensor) -> None:
        """Fill the bucket's rows of `out`; its K and V are in the cache already."""
        query, scale, sinks = heads.query, heads.scale, heads.sinks
        keys, values = self._cache.read(place, self._pages)
        if len(self._unseen):
            for x in (keys, values):
                x.view(-1, x.shape[-1]).index_fill_(0, self._unseen, 0)
        # Query heads of one KV head are treated as consecutive queries.
        grouped = query[self._rows].view(len(keys), keys.shape[1], -1, query.shape[-1])
        if sinks is None:
            found = scaled_dot_product_attention(
                grouped, keys, values, attn_mask=self._mask, scale=scale
            )
        else:
            of_heads = sinks.view(keys.shape[1], -1, 1)
            hidden = self._hidden[:, None, None]
            found = attention_with_sinks(grouped, keys, values, hidden, scale, of_heads)
        out[self._rows] = found.flatten(1, 2)

    def _rows_unseen(self, tables: Tensor) -> Tensor:
        """Rows read by `TokenView.read` that may contain anything: in first and last blocks.

        After these come null blocks, which are zero. So the rows are few, and zeroing them costs
        little compared to the read.
        """
        size, heads = self._cache.block_size, self._cache.shape[0]
        inside = torch.arange(tables.shape[1] * size, device=tables.device) < (
            (self._lens[:, None] + size - 1) // size * size
        )
        sequence, position = (self._hidden & inside).nonzero(as_tuple=True)
        row = sequence[:, None] * heads + torch.arange(heads, device=tables.device)
        return (row * inside.shape[1] + position[:, None]).flatten()


@dataclass(frozen=True)
class Prompt:
    """Several tokens of one sequence.

    Attributes:
        cache: The group's view of the pool.
        rows: Rows of the tokens in the batch.
        count: Number of tokens.
        context_len: Number of tokens up to the last one, from `begin` on.
        table: [1, blocks] int64.
        group: KV group.
        begin: Number of tokens before `table`.
        last_keys: [count] int64, last position after `begin` that each token attends to; None for
            its own.
    """

    cache: TokenView
    rows: slice
    count: int
    context_len: int
    table: Tensor
    group: KVGroup
    begin: int
    last_keys: Tensor | None

    def attend(self, place: int, heads: Heads, out: Tensor) -> None:
        """Fill the prompt's rows of `out`."""
        whole = self.context_len == self.count
        if heads.key is not None and heads.value is not None and whole:
            key, value = (x[self.rows].transpose(0, 1)[None] for x in (heads.key, heads.value))
        else:
            key, value = self.cache.read(place, self.cache.page_rows(self.table))
            key, value = key[:, :, : self.context_len], value[:, :, : self.context_len]
        query = heads.query[self.rows].transpose(0, 1)[None]
        scale, sinks = heads.scale, heads.sinks
        last, group = self.begin + self.context_len - 1, self.group
        first = first_attended(last, group.window, group.chunked)
        if whole and first <= self.begin and self.last_keys is None and sinks is None:
            found = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
        else:
            masks = 1 if sinks is None else len(sinks)  # with sinks, there are logits per head
            tile = max(1, TILE_ELEMENTS // (self.context_len * masks))
            tiles = zip(range(0, self.count, tile), torch.split(query, tile, dim=2), strict=True)
            outs = [self._tile(some, key, value, scale, sinks, start) for start, some in tiles]
            found = torch.cat(outs, dim=2)
        out[self.rows] = found[0].transpose(0, 1)

    def _tile(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        sinks: Tensor | None,
        start: int,
    ) -> Tensor:
        """Attention of the queries from `start` on, over all keys that any of them sees."""
        first = self.context_len - self.count + start
        end = first + query.shape[2]
        at = last = torch.arange(first, end, device=query.device)[:, None]
        if self.last_keys is not None:
            last = self.last_keys[start : start + len(at), None]
            end = int(last.max()) + 1
        window, chunked = self.group.window, self.group.chunked
        begins = first_attended(at + self.begin, window, chunked) - self.begin
        begin = max(0, int(begins[0]))
        key_at = torch.arange(begin, end, device=query.device)
        seen = (key_at <= last) & (key_at >= begins)
        key, value = key[:, :, begin:end], value[:, :, begin:end]
        if sinks is not None:
            group = len(sinks) // key.shape[1]
            key, value = (x.repeat_interleave(group, 1) for x in (key, value))
            return attention_with_sinks(query, key, value, ~seen, scale, sinks[:, None, None])
        return scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scale, enable_gqa=True
        )


def _parts(
    cache: TokenView, batch: PagedBatch, g: int, group: KVGroup
) -> Iterator[DecodeBucket | Prompt]:
    """The buckets and prompts of one group in a step.

    Sequences with one token are grouped by the power of two of their number of blocks. Blocks
    behind the group's window are left out, so positions are counted from `begins`.
    """
    counts, lens, tables = batch.query_lens, batch.context_lens, batch.block_tables[:, g]
    begins, size = np.zeros_like(lens), cache.block_size
    if group.window:
        behind = first_attended(lens - counts, group.window, group.chunked) // size
        columns = np.arange((-(-lens // size) - behind).max())
        at = np.minimum(behind[:, None] + columns, tables.shape[1] - 1)
        tables = np.take_along_axis(tables, at, 1)
        begins = behind * size
    firsts = first_attended(lens - 1, group.window, group.chunked) - begins
    lens = lens - begins
    rows, needed = np.cumsum(counts) - counts, -(-lens // size)
    # A table goes on behind the last block that is seen, to those of a draft.
    tables = np.where(np.arange(tables.shape[1]) < needed[:, None], tables, 0)
    decoding = np.flatnonzero(counts == 1)
    magnitude = np.ceil(np.log2(needed[decoding])).astype(np.int64)
    for power in np.unique(magnitude):
        chosen = decoding[magnitude == power]
        blocks = int(needed[chosen].max())
        heads, _, _, _, dim = cache.shape
        most = max(1, BUCKET_ELEMENTS // (blocks * heads * size * dim))
        for start in range(0, len(chosen), most):
            part = chosen[start : start + most]
            arrays = rows[part], lens[part], tables[part, :blocks], firsts[part]
            yield DecodeBucket(cache, *(_to_device(array, cache) for array in arrays))
    for index in np.flatnonzero(counts > 1):
        first, count, begin = int(rows[index]), int(counts[index]), int(begins[index])
        own, last = slice(first, first + count), None
        if batch.last_keys is not None:
            last = _to_device(batch.last_keys[own] - begin, cache)
        pages = _to_device(tables[index : index + 1, : needed[index]], cache)
        yield Prompt(cache, own, count, int(lens[index]), pages, group, begin, last)


def _to_device(array: npt.NDArray[np.int64], cache: TokenView) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(cache.data.device)
