"""Layout of a training step: every token, mask and logprob in its place."""

from __future__ import annotations

import numpy as np
import polars as pl

from tests.support.policies import transition_row
from trainer.data.batch import layout
from trainer.data.merge import merge, separate

ROWS = pl.DataFrame(
    [
        transition_row("a", PromptIds=[7], ResponseIds=[8, 9, 10], Logprobs=[-1.0, -2.0, -3.0], Temperature=0.5, Version=3),
        transition_row("b", PromptIds=[4, 5, 6], ResponseIds=[2], Logprobs=[-0.25], Version=2),
    ]
)


def test_layout_with_no_op_rows_places_every_value():
    batch = layout(separate(ROWS, pl.Series([1.5, -0.5])), lineage=[2, 3], divisor=3)
    assert batch.prompts.tolist() == [[0, 0, 7], [4, 5, 6], [0, 0, 0]]
    assert batch.responses.tolist() == [[8, 9, 10], [2, 0, 0], [0, 0, 0]]
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0]]
    assert batch.response_mask.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert batch.logprobs.tolist() == [[-1.0, -2.0, -3.0], [-0.25, 0, 0], [0, 0, 0]]
    assert batch.advantages.tolist() == [[1.5, 1.5, 1.5], [-0.5, 0, 0], [0, 0, 0]]
    assert batch.temperature.tolist() == [0.5, 1.0, 1.0]
    assert batch.versions.tolist() == [[3, 3, 3], [2, -1, -1], [-1, -1, -1]]
    assert batch.staleness.tolist() == [[0, 0, 0], [1, -1, -1], [-1, -1, -1]]
    assert (batch.rollout.tolist(), batch.group.tolist()) == ([0, 1, -1], [0, 0, -1])
    assert (batch.real_rows, batch.trainable, batch.token_counts) == (2, True, [4, 4, 1])


def test_layout_of_call_across_versions_has_version_per_token():
    crossed = {"Version": 1, "Versions.Start": [0, 1, 3], "Versions.Version": [1, 4, 9]}
    rows = pl.DataFrame([transition_row("a", ResponseIds=[5, 6, 7, 8], Logprobs=[-1.0] * 4, **crossed), transition_row("b", Version=4)])
    batch = layout(separate(rows, pl.Series([1.0, 1.0])), lineage=[1, 2, 4])
    assert batch.versions.tolist() == [[1, 4, 4, 9], [4, 4, -1, -1]]
    assert batch.staleness.tolist() == [[2, 0, 0, -1], [0, 0, -1, -1]], "9 is not of this branch"


def test_layout_of_merged_sequence_masks_observations():
    rows = pl.DataFrame(
        [
            transition_row("a", 0, PromptIds=[7, 8], ResponseIds=[9], Logprobs=[-1.0]),
            transition_row("a", 1, PromptIds=[7, 8, 9, 5, 6], ResponseIds=[4, 3], Logprobs=[-2.0, -3.0]),
            transition_row("b", 0, PromptIds=[1], ResponseIds=[2], Logprobs=[-4.0]),
        ]
    )
    batch = layout(merge(rows, pl.Series([0.5, -0.5, 2.0])), lineage=[0])
    assert batch.prompts.tolist() == [[7, 8], [0, 1]]
    assert batch.responses.tolist() == [[9, 5, 6, 4, 3], [2, 0, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0, 0]]
    assert batch.response_mask.tolist() == [[1, 0, 0, 1, 1], [1, 0, 0, 0, 0]]
    assert batch.logprobs.tolist() == [[-1.0, 0, 0, -2.0, -3.0], [-4.0, 0, 0, 0, 0]]
    assert batch.advantages.tolist() == [[0.5, 0, 0, -0.5, -0.5], [2.0, 0, 0, 0, 0]]
    assert (batch.real_rows, batch.token_counts) == (2, [7, 2])


def test_layout_of_zero_advantages_is_not_trainable():
    batch = layout(separate(ROWS, pl.Series([0.0, 0.0])), lineage=[3])
    assert (batch.real_rows, len(batch.prompts), batch.trainable) == (2, 2, False)


def test_layout_ids_and_logprobs_keep_their_bits():
    rows = pl.DataFrame([transition_row("a", PromptIds=[2**31 + 5], ResponseIds=[2**32 - 1], Logprobs=[np.float32(-0.1).item()])])
    for make in (separate, merge):
        batch = layout(make(rows, pl.Series([1.0])), lineage=[0])
        assert (batch.prompts.tolist(), batch.responses.tolist()) == ([[2**31 + 5]], [[2**32 - 1]])
        assert batch.logprobs.dtype == np.float32
        assert batch.logprobs.tolist() == [[np.float32(-0.1).item()]]
