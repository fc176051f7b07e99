"""Micro-batches of bounded padded size, which a device holds at a time when rows are not packed end to end.

Invariant: every row is in exactly one micro-batch, rows of a unit are in the same one, and the number of rows times the longest of them is
within the bound, unless one unit alone exceeds it.

verl's own partition bounds the sum of tokens, the size of a packed forward pass; a padded one holds rows x longest tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from spangrad.errors import TrainerError


def padded_partition(lengths: Sequence[int], limit: int, units: Sequence[int] | None = None) -> list[list[int]]:
    """Divide rows among micro-batches of at most `limit` padded tokens, rows of similar lengths together.

    Args:
        lengths: tokens of each row.
        limit: largest number of rows times the longest of them, in tokens.
        units: number of each row's unit, whose rows stay in one micro-batch. None: each row is a unit.

    Returns:
        The rows of each micro-batch, longest first.
    """
    rows_of: dict[int, list[int]] = {}
    for row, unit in enumerate(range(len(lengths)) if units is None else units):
        rows_of.setdefault(unit, []).append(row)
    longest_first = sorted(rows_of.values(), key=lambda rows: (-max(lengths[row] for row in rows), rows[0]))
    parts: list[list[int]] = []
    width = 0
    for rows in longest_first:
        if parts and (len(parts[-1]) + len(rows)) * width <= limit:
            parts[-1] += rows
        else:
            parts.append(list(rows))
            width = max(lengths[row] for row in rows)
    return parts


def split_to(parts: list[list[int]], count: int, units: Sequence[int] | None = None) -> list[list[int]]:
    """Split the micro-batches of most rows until there are `count`: every rank of a group makes as many collective calls.

    Raises:
        TrainerError: there are fewer units than that.
    """
    parts = [list(part) for part in parts]
    unit_of: Callable[[int], int] = (lambda row: row) if units is None else units.__getitem__
    while len(parts) < count:
        cuts = [(len(part), at, _middle(part, unit_of)) for at, part in enumerate(parts)]
        _, at, middle = max((cut for cut in cuts if cut[2]), default=(0, 0, 0))
        if not middle:
            raise TrainerError(
                f"this worker's rows make {len(parts)} micro-batches at most, and another worker needs {count}. Raise "
                "trainer.max_tokens_per_device or trainer.sampling.groups_per_batch, or train with fewer workers."
            )
        parts[at : at + 1] = [parts[at][:middle], parts[at][middle:]]
    return parts


def _middle(part: Sequence[int], unit_of: Callable[[int], int]) -> int:
    """Return the place nearest the middle of a micro-batch where one unit ends; 0: it holds one unit alone."""
    boundaries = [at for at in range(1, len(part)) if unit_of(part[at - 1]) != unit_of(part[at])]
    return min(boundaries, key=lambda at: abs(2 * at - len(part)), default=0)


@functools.cache
def bound_padded_micro_batches() -> None:
    """Make verl's FSDP engine cut its micro-batches by `padded_partition`."""
    import torch
    from verl.utils import tensordict_utils as tu
    from verl.utils.device import get_device_name
    from verl.workers.engine.fsdp import transformer_impl

    def prepare(data: Any, dp_group: Any = None, **options: Any) -> tuple[list[Any], list[list[int]]]:
        lengths = data["input_ids"].offsets().diff().tolist()
        size: Any = tu.get_non_tensor_data(data=data, key="force_group_size", default=1)  # such as the two rows of a preference
        units = [row // size for row in range(len(lengths))]
        parts = padded_partition(lengths, int(data["max_token_len_per_gpu"]), units)
        if dp_group is not None:
            count = torch.tensor(len(parts), device=get_device_name())
            torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX, group=dp_group)
            parts = split_to(parts, int(count), units)
        return [tu.index_select_tensor_dict(data, part) for part in parts], parts

    transformer_impl.prepare_micro_batches = prepare  # pyright: ignore[reportPrivateImportUsage]
