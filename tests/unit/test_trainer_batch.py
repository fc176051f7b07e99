"""Layout of a training step: every token, mask and logprob in its place."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from fakes import transition_row
from spangrad.errors import TrainerError
from trainer.batch import layout

ROWS = pl.DataFrame(
    [
        transition_row("a", PromptIds=[7], ResponseIds=[8, 9, 10], Logprobs=[-1.0, -2.0, -3.0], Temperature=0.5, Version=3),
        transition_row("b", PromptIds=[4, 5, 6], ResponseIds=[2], Logprobs=[-0.25], Version=2),
    ]
)


def test_whole_layout_with_no_op_rows():
    batch = layout(ROWS, pl.Series([1.5, -0.5]), version=3, max_tokens=4, divisor=3)
    assert batch.prompts.tolist() == [[0, 0, 7], [4, 5, 6], [0, 0, 0]]
    assert batch.responses.tolist() == [[8, 9, 10], [2, 0, 0], [0, 0, 0]]
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0]]
    assert batch.response_mask.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert batch.logprobs.tolist() == [[-1.0, -2.0, -3.0], [-0.25, 0, 0], [0, 0, 0]]
    assert batch.advantages.tolist() == [[1.5, 1.5, 1.5], [-0.5, 0, 0], [0, 0, 0]]
    assert batch.temperature.tolist() == [0.5, 1.0, 1.0]
    assert batch.current.tolist() == [True, False, False]
    assert (batch.real_rows, batch.trainable, batch.token_counts) == (2, True, [4, 4, 1])


def test_zero_advantages_are_not_trainable():
    batch = layout(ROWS, pl.Series([0.0, 0.0]), version=3, max_tokens=4)
    assert (batch.real_rows, len(batch.prompts), batch.trainable) == (2, 2, False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"PromptIds": []}, "transition-a-0 has 0 prompt and 2 response tokens"),
        ({"ResponseIds": [], "Logprobs": []}, "transition-a-0 has 3 prompt and 0 response tokens"),
        ({"Logprobs": [-1.0]}, "transition-a-0 has 2 response tokens and 1 logprobs"),
        ({"PromptIds": [1] * 9}, "has 11 tokens and trainer.max_tokens_per_device = 10"),
    ],
)
def test_rows_that_cannot_be_trained_are_named(changes: dict[str, object], says: str):
    with pytest.raises(TrainerError, match=says):
        layout(pl.DataFrame([transition_row("a", **changes)]), pl.Series([1.0]), version=0, max_tokens=10)


def test_ids_and_logprobs_keep_their_bits():
    rows = pl.DataFrame([transition_row("a", PromptIds=[2**31 + 5], ResponseIds=[2**32 - 1], Logprobs=[np.float32(-0.1).item()])])
    batch = layout(rows, pl.Series([1.0]), version=0, max_tokens=10)
    assert (batch.prompts.tolist(), batch.responses.tolist()) == ([[2**31 + 5]], [[2**32 - 1]])
    assert batch.logprobs.dtype == np.float32
    assert batch.logprobs.tolist() == [[np.float32(-0.1).item()]]
