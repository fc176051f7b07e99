"""Copies of a rank's own parts of tensors in main memory, as files take them.

In: parts on a device. Out: parts of a file (`trainer.publish.shared_file`). Invariant: what is held is the rank's share, and nothing whole.
"""

from __future__ import annotations

import torch

from trainer.publish.shared_file import FilePart

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


def host_part(name: str, shape: tuple[int, ...], first: int, words: torch.Tensor, *, copy: bool) -> FilePart:
    """Return a part in main memory.

    Args:
        name: of the tensor in the file.
        shape: of the whole tensor.
        first: number of the first word.
        words: of the part, on any device.
        copy: True to copy what is in main memory already.
    """
    held = words.detach().to("cpu", copy=copy).contiguous()
    raw = held.view(torch.int16) if held.dtype is torch.bfloat16 else held
    return FilePart(name, DTYPES[held.dtype], shape, first, raw.numpy())
