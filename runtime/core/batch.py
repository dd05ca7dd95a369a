"""Tensors of a step plan: the flat token axis, attention groups with their blocks, and sampling metadata."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch
from torch import Tensor

from runtime.core.attention_window import FULL_ATTENTION, AttentionWindow
from runtime.core.draft_tree import ancestor_bits, paths
from runtime.core.logit_bias import LogitBias
from runtime.core.repetitions import dry_penalties
from runtime.core.request import Constraint, SamplingParams
from runtime.core.request import Sequence as LiveSequence
from runtime.core.state_rows import StateRows
from runtime.core.step import KNOWN, ScheduledSequence

MIN_SHARED_BLOCKS = 16
"""Smallest padded length of block tables. Short spans of equal length share an attention call if their block tables
round up to the same power of two."""
MAX_SHARED_TOKENS = 17
"""Maximum tokens of a short span: one known token and the longest draft."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows of the token axis in one attention call: equal numbers of tokens of several sequences, or one span.

    Attributes:
        rows: slice of the token axis.
        blocks: `[num_sequences * n]` block ids; blocks outside the window of all rows are omitted, and shorter tables
            are padded with the sequence's own first block.
        positions: `[rows]`, indices into the keys of these blocks; a token attends to keys up to its own position.
        num_sequences: number of sequences, whose rows are consecutive.
        num_keys: keys per sequence that at least one row attends to.
        ragged: whether some row attends to fewer keys than `num_keys`, other than by causality inside a whole prompt.
        ancestors: int64 `[rows]`, tree attention mask of draft trees: bit k is set if the row attends to the key of the
            k-th row of its sequence. None: causal attention.
    """

    rows: slice
    blocks: Tensor
    positions: Tensor
    num_sequences: int
    num_keys: int
    ragged: bool
    ancestors: Tensor | None = None

    @property
    def tree(self) -> tuple[Tensor, Tensor] | None:
        """Key index of the sequence's first row, and ancestors, of every row; None without trees."""
        if self.ancestors is None:
            return None
        positions = self.positions.view(self.num_sequences, -1)
        return positions[:, :1].expand_as(positions).flatten(), self.ancestors

    def tree_in(self, chunk: int | None) -> tuple[Tensor, Tensor] | None:
        """Returns `tree` without ancestors outside the row's own chunk of this many tokens; None is one chunk."""
        if chunk is None or self.tree is None:
            return self.tree
        roots, ancestors = self.tree
        outside = self.positions // chunk * chunk - roots
        for number in range(len(ancestors) // self.num_sequences):
            # Deeper ancestors have higher bits, so the lowest bits belong to earlier chunks.
            ancestors = torch.where(outside > number, ancestors & (ancestors - 1), ancestors)
        return roots, ancestors


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Rows of a step by sequence, for attention of all of them in one call. Rows of a sequence follow each other.

    Attributes:
        starts: int64 `[S + 1]`, first row of every sequence, then the number of rows.
        tables: int64 `[S]`, where the block table of every sequence begins in `blocks`.
        blocks, positions: see `AttentionGroup`, of all sequences; position -1 is padding, which attends to nothing.
        ancestors: int64 `[T]`, see `AttentionGroup`; 0 for rows of causal attention. None: no sequence has a tree.
        longest, num_keys: most tokens, and most keys, that a sequence may have.
        lengths: tokens and keys of every sequence; empty if the tensors are filled later, as in a captured step.
    """

    starts: Tensor
    tables: Tensor
    blocks: Tensor
    positions: Tensor
    ancestors: Tensor | None
    longest: int
    num_keys: int
    lengths: tuple[tuple[int, int], ...] = ()

    def first(self, count: int) -> RaggedRows:
        """Returns those of the first sequences, whose lengths are known."""
        lengths = self.lengths[:count]
        longest, num_keys = (max(column, default=0) for column in zip(*lengths, strict=True))
        return replace(
            self,
            starts=self.starts[: count + 1],
            tables=self.tables[:count],
            longest=longest,
            num_keys=num_keys,
            lengths=lengths,
        )


def equal_rows(group: AttentionGroup) -> RaggedRows:
    """Returns the rows of a group by sequence, for a step whose lengths are filled in later."""
    count = group.num_sequences
    numbers = torch.arange(count + 1, device=group.blocks.device)
    each, width = len(group.positions) // count, len(group.blocks) // count
    starts, tables = numbers * each, numbers[:-1] * width
    return RaggedRows(starts, tables, group.blocks, group.positions, group.ancestors, each, group.num_keys)


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one step as tensors.

    Attributes:
        entries: scheduled sequences in the order of their rows.
        token_ids, positions, slots: int64 `[T]`; slot = block id * block_size + offset.
        groups: attention groups, which cover the token axis in order.
        sampling: entries that sample.
        sample_rows: int64, the last row of each sampling entry, and the row before each of its draft tokens.
        prompt_rows: entries that need their whole prompt, with the rows of their span.
        fresh_blocks: blocks that this step starts and leaves partially filled.
        state_rows: layout of recurrent states, if it is built already.
        ragged: the rows by sequence; None for backends that attend group by group.
    """

    entries: tuple[ScheduledSequence, ...]
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    groups: tuple[AttentionGroup, ...]
    sampling: tuple[ScheduledSequence, ...]
    sample_rows: Tensor
    prompt_rows: tuple[tuple[ScheduledSequence, slice], ...]
    fresh_blocks: tuple[int, ...]
    state_rows: StateRows | None = None
    ragged: RaggedRows | None = None


def build_batch(
    entries: Sequence[ScheduledSequence],
    block_size: int,
    device: torch.device,
    attention_window: AttentionWindow = FULL_ATTENTION,
) -> Batch:
    """Orders the entries (short ones by length, then spans) and lays out their tokens, slots and block tables."""
    # Without a window the index of a gathered key is its position.
    bounded = attention_window.window is not None
    groups = group_entries(entries, block_size, attention_window)
    ordered = [entry for group in groups for entry in group]
    stops = list(accumulate(entry.num_tokens for entry in ordered))
    tables = [block_table(group, block_size, attention_window) for group in groups]
    widths = [len(table) // len(group) for group, table in zip(groups, tables, strict=True) for _ in group]
    parts = [
        list(chain.from_iterable(token_ids_of(entry) for entry in ordered)),
        list(chain.from_iterable(positions_of(entry) for entry in ordered)),
        list(chain.from_iterable(slots_of(entry, block_size) for entry in ordered)),
        list(chain.from_iterable(_sample_rows(entry, stop) for entry, stop in zip(ordered, stops, strict=True))),
        list(chain.from_iterable(_key_positions(entry, block_size, attention_window) for entry in ordered))
        if bounded
        else [],
        list(chain.from_iterable(map(_ancestors, ordered))) if any(entry.has_tree for entry in ordered) else [],
        [0, *stops],
        [0, *accumulate(widths[:-1])],
        *tables,
    ]
    # A single transfer: on small models, and on a GPU, each small tensor costs as much as a layer.
    numbers = array("q")
    for part in parts:
        numbers.fromlist(part)  # twice as fast as an iterator over all of them
    flat = upload(numbers, device)
    sizes = [len(part) for part in parts]
    token_ids, positions, slots, sample_rows, key_positions, ancestors, starts, firsts, *blocks = flat.split(sizes)
    if not bounded:
        key_positions = positions
    lengths = tuple(
        (entry.num_tokens, _stop(entry) - num_hidden_keys(entry, block_size, attention_window)) for entry in ordered
    )
    longest, num_keys = (max(column) for column in zip(*lengths, strict=True))
    all_blocks = flat[len(flat) - sum(map(len, blocks)) :]
    bits = ancestors if len(ancestors) else None
    return Batch(
        tuple(ordered),
        token_ids,
        positions,
        slots,
        _attention_groups(groups, blocks, key_positions, ancestors, block_size, attention_window),
        tuple(entry for entry in ordered if entry.samples),
        sample_rows,
        tuple(_prompt_rows(ordered, stops)),
        tuple(block for entry in ordered for block in fresh_blocks(entry, block_size)),
        ragged=RaggedRows(starts, firsts, all_blocks, key_positions, bits, longest, num_keys, lengths),
    )


def _ancestors(entry: ScheduledSequence) -> Sequence[int]:
    return ancestor_bits(entry.draft_parents) if entry.has_tree else [0] * entry.num_tokens


def group_entries(
    entries: Sequence[ScheduledSequence], block_size: int, attention_window: AttentionWindow = FULL_ATTENTION
) -> list[list[ScheduledSequence]]:
    """Groups single tokens, and drafts of equal size, by similar context length, which limits padding to twice the
    work; longer spans form their own groups, the longest last."""
    shared: dict[tuple[int, int, bool], list[ScheduledSequence]] = {}
    for entry in entries:
        if entry.num_tokens <= MAX_SHARED_TOKENS:
            last = (_stop(entry) - 1 - num_hidden_keys(entry, block_size, attention_window)) // block_size
            blocks = max(MIN_SHARED_BLOCKS, 1 << last.bit_length())
            shared.setdefault((entry.num_tokens, blocks, entry.has_tree), []).append(entry)
    groups = [shared[size] for size in sorted(shared)]
    spans = (entry for entry in entries if entry.num_tokens > MAX_SHARED_TOKENS)
    return groups + [[entry] for entry in sorted(spans, key=lambda entry: entry.num_tokens)]


def block_table(
    group: Sequence[ScheduledSequence], block_size: int, attention_window: AttentionWindow = FULL_ATTENTION
) -> list[int]:
    """Returns the concatenated block ids inside the window of each sequence, padded to the same length."""
    tables = [visible_blocks(entry, block_size, attention_window) for entry in group]
    longest = max(len(table) for table in tables)
    for table in tables:
        table += table[:1] * (longest - len(table))
    return list(chain.from_iterable(tables))


def visible_blocks(entry: ScheduledSequence, block_size: int, attention_window: AttentionWindow) -> list[int]:
    """Returns block ids inside the window of any token of the span, up to the last token."""
    block_ids, stop = entry.sequence.block_ids, _last_block(entry, block_size) + 1
    if attention_window.window is None:
        return block_ids[:stop]
    hidden = attention_window.evictable_blocks(entry.start, block_size)
    return block_ids[: hidden.start] + block_ids[hidden.stop : stop]


def _attention_groups(
    groups: Sequence[Sequence[ScheduledSequence]],
    tables: Sequence[Tensor],
    positions: Tensor,
    ancestors: Tensor,
    block_size: int,
    attention_window: AttentionWindow,
) -> tuple[AttentionGroup, ...]:
    layout, row = [], 0
    for group, table in zip(groups, tables, strict=True):
        rows = slice(row, row + sum(entry.num_tokens for entry in group))
        lengths = [_stop(entry) - num_hidden_keys(entry, block_size, attention_window) for entry in group]
        partial_span = group[0].num_tokens > 1 and (group[0].start > 0 or len(group) > 1)
        ragged = partial_span or min(lengths) < max(lengths)
        bits = ancestors[rows] if group[0].has_tree else None
        layout.append(AttentionGroup(rows, table, positions[rows], len(group), max(lengths), ragged, bits))
        row = rows.stop
    return tuple(layout)


def num_hidden_keys(entry: ScheduledSequence, block_size: int, attention_window: AttentionWindow) -> int:
    """Returns the number of keys in omitted blocks, which are outside the window of the whole span."""
    if attention_window.window is None:
        return 0
    return len(attention_window.evictable_blocks(entry.start, block_size)) * block_size


def _key_positions(entry: ScheduledSequence, block_size: int, attention_window: AttentionWindow) -> list[int]:
    num_hidden = num_hidden_keys(entry, block_size, attention_window)
    return [position - num_hidden for position in positions_of(entry)]


def positions_of(entry: ScheduledSequence) -> Iterable[int]:
    """Returns positions of the span's tokens in the text; draft tokens with the same parent share a position."""
    if entry.has_tree:
        return [entry.start, *(entry.start + len(path) for path in paths(entry.draft_parents))]
    return range(entry.start, _stop(entry))


def _stop(entry: ScheduledSequence) -> int:
    return entry.start + entry.num_tokens


def token_ids_of(entry: ScheduledSequence) -> list[int]:
    """Returns token ids of the span, draft tokens included; 0 for a token that the previous step has not returned."""
    if entry.source_row != KNOWN:
        return [0]
    token_ids = entry.sequence.token_ids[entry.start : _stop(entry)]
    if len(token_ids) < entry.num_tokens:
        token_ids += entry.sequence.draft_token_ids[: entry.num_tokens - len(token_ids)]
    return token_ids


def _sample_rows(entry: ScheduledSequence, stop_row: int) -> range:
    """Returns the rows with needed logits, of a span that ends before `stop_row`."""
    if not entry.samples:
        return range(0)
    return range(stop_row - 1 - entry.num_draft_tokens, stop_row)


def _prompt_rows(
    entries: Sequence[ScheduledSequence], stop_rows: Sequence[int]
) -> Iterator[tuple[ScheduledSequence, slice]]:
    for entry, stop_row in zip(entries, stop_rows, strict=True):
        if entry.sequence.wants_whole_prompt:
            yield entry, slice(stop_row - entry.num_tokens, stop_row)


def slots_of(entry: ScheduledSequence, block_size: int) -> list[int]:
    """Returns the KV cache slots of the span's tokens."""
    block_ids, stop, slots = entry.sequence.block_ids, _stop(entry), list[int]()
    for index in range(entry.start // block_size, _last_block(entry, block_size) + 1):
        shift = (block_ids[index] - index) * block_size
        slots += range(shift + max(entry.start, index * block_size), shift + min(stop, (index + 1) * block_size))
    return slots


def _last_block(entry: ScheduledSequence, block_size: int) -> int:
    return (_stop(entry) - 1) // block_size


def fresh_blocks(entry: ScheduledSequence, block_size: int) -> list[int]:
    """Returns the last block of a span if it starts here and is not filled: its remaining slots must be cleared."""
    last = _last_block(entry, block_size)
    begun = last * block_size >= entry.start
    return [entry.sequence.block_ids[last]] if begun and _stop(entry) % block_size else []


def upload(integers: Iterable[int], device: torch.device) -> Tensor:
    """Uploads integers as int64 `[n]`. An intermediate array is several times faster than a list."""
    numbers = array("q", integers)
    if not numbers:
        return torch.empty(0, dtype=torch.int64, device=device)
    return to_device(torch.frombuffer(numbers, dtype=torch.int64), device)


def upload_columns(
    integers: Sequence[Sequence[int]], floats: Sequence[Sequence[float]], device: torch.device
) -> list[Tensor]:
    """Uploads columns of equal length in one transfer: int64 `[n]` each, then float64 `[n]` each."""
    packed, numbers = array("q"), array("d")
    for column in integers:
        packed.extend(column)
    for values in floats:
        numbers.extend(values)
    packed.frombytes(numbers.tobytes())
    columns = to_device(torch.frombuffer(packed, dtype=torch.int64), device).chunk(len(integers) + len(floats))
    return [*columns[: len(integers)], *(column.view(torch.float64) for column in columns[len(integers) :])]


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to a device; returns it unchanged on a CPU. Uses pinned memory, which torch does not reuse
    before the copy completes: a copy from pageable memory would wait for all queued work of the device."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Sampling parameters of one row. They depend on its sequence only, which makes its token independent of the batch.

    Attributes:
        position: position of the new token in its sequence.
        prompt_token_ids, output_token_ids: preceding tokens, as far as penalties need them.
        mask: one bit per token id, lowest bit of the first byte first; only tokens whose bit is set may be sampled.
            None allows all.
        unread: int64 `[]`, the token after these, of which only the device knows so far, as far as penalties need it;
            below 0 if none was sampled. None: all are known.
    """

    sampling: SamplingParams
    seed: int
    position: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    mask: bytes | None = None
    unread: Tensor | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether bias, mask or penalties apply."""
        return self.mask is not None or self.sampling.reads_history


def build_sampling_metadata(entry: ScheduledSequence, unread: Tensor | None = None) -> list[SamplingMetadata]:
    """Builds the metadata of rows `num_tokens - 1` to `num_tokens - 1 + num_draft_tokens` of an entry that samples.

    Row `i` treats draft token `i - 1` and those before it (its ancestors in a tree) as accepted: they are in its
    history and in the state of its constraint. The constraint is restored; a sequence with a constraint has no tree.

    Args:
        unread: see `SamplingMetadata`; for an entry without draft tokens.
    """
    sequence = entry.sequence
    draft = sequence.draft_token_ids[: entry.num_draft_tokens]
    masks = _masks(sequence.constraint, draft)
    drafted = [[], *([draft[number] for number in path] for path in paths(entry.draft_parents))] if draft else [[]]
    position = entry.start + entry.num_tokens - entry.num_draft_tokens
    return [_metadata(sequence, position, before, mask, unread) for before, mask in zip(drafted, masks, strict=True)]


def _metadata(
    sequence: LiveSequence, position: int, drafted: list[int], mask: bytes | None, unread: Tensor | None
) -> SamplingMetadata:
    request, sampling = sequence.request, sequence.request.sampling
    if sampling.has_dry:
        histories = request.prompt_token_ids, sequence.output_token_ids + drafted
        penalties = dry_penalties(sampling, sampling.dry_breakers, *histories)
        added = ((token_id, -penalty) for token_id, penalty in penalties.items())
        sampling = replace(sampling, logit_bias=LogitBias.summed((*sampling.logit_bias, *added)))
    prompt = request.prompt_token_ids if sampling.repetition_penalty != 1 else ()
    output = sequence.output_token_ids + drafted if sampling.has_penalties else ()
    return SamplingMetadata(sampling, request.seed, position + len(drafted), prompt, output, mask, unread)


def _masks(constraint: Constraint | None, draft: list[int]) -> list[bytes | None]:
    """Returns a mask per row. Rows after a forbidden draft token have none: that token is never accepted."""
    masks: list[bytes | None] = [None] * (len(draft) + 1)
    if constraint is None:
        return masks
    masks[0] = constraint.mask()
    num_accepted = 0
    while num_accepted < len(draft) and constraint.accept([draft[num_accepted]]):
        num_accepted += 1
        masks[num_accepted] = constraint.mask()
    constraint.rollback(num_accepted)
    return masks


MIN_TEMPERATURE = 1e-20
"""Lower bound on temperatures above 0: logits divided by it differ by more than the noise, and stay finite."""


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Noise stream, temperature and truncation of rows to sample, `[R]` each.

    Attributes:
        seeds, positions: int64; the noise of a row depends on them and the token id only.
        top_k: int64.
        temperature: float64; 0 is greedy, without noise.
        top_p, min_p: float64.
    """

    seeds: Tensor
    positions: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor

    @property
    def is_truncated(self) -> Tensor:
        """Whether rows are sampled from a truncated distribution, bool `[R]`; see `SamplingParams.is_truncated`."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    def temper(self, scores: Tensor) -> Tensor:
        """Divides scores `[R, V]` by the temperature, all of which must be above 0."""
        return scores / self.temperature.to(scores.dtype).unsqueeze(-1)

    def limits(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Returns top-k, top-p and min-p in the dtype of scores."""
        return self.top_k, self.top_p.to(dtype), self.min_p.to(dtype)


def upload_sampling_tensors(
    draws: Sequence[SamplingMetadata], rows: Sequence[int], device: torch.device
) -> tuple[Tensor, SamplingTensors]:
    """Uploads row indices, int64 `[R]`, and their sampling tensors in one transfer."""
    mine = [draws[row] for row in rows]
    integers = zip(*(integers_of(draw.sampling, draw.seed, draw.position) for draw in mine), strict=True)
    floats = zip(*(floats_of(draw.sampling) for draw in mine), strict=True)
    index, *columns = upload_columns((rows, *integers), tuple(floats), device)
    return index, SamplingTensors(*columns)


def integers_of(sampling: SamplingParams, seed: int, position: int) -> tuple[int, int, int]:
    """Returns seed, position and top-k: the integer columns of `SamplingTensors`."""
    return seed, position, sampling.top_k


def floats_of(sampling: SamplingParams) -> tuple[float, float, float]:
    """Returns temperature, top-p and min-p; only temperature 0 is greedy."""
    temperature = max(sampling.temperature, MIN_TEMPERATURE) if sampling.temperature > 0 else 0.0
    return temperature, sampling.top_p, sampling.min_p


MIN_REPETITION_PENALTY = 1e-10
"""Lower bound on repetition penalties, which keeps quotients finite."""


def penalty_factors(sampling: SamplingParams) -> tuple[float, float, float]:
    """Returns repetition, frequency and presence penalty."""
    repetition = max(sampling.repetition_penalty, MIN_REPETITION_PENALTY)
    return repetition, sampling.frequency_penalty, sampling.presence_penalty
