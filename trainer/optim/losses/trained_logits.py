"""Logits of the trained tokens alone, and what losses read of them: logprobs, entropy, sums of squared probabilities.

In: verl's engine of a policy. Out: the same engine, whose head is applied where the next token is trained. Invariant: outputs for those
tokens are verl's; for all others they are 0, and nothing of the vocabulary's size is computed or held for them.

Of an agent's rollouts most tokens are prompts and observations. verl 0.9.1 has logits of all of them, in float32: with a vocabulary of
150,000, 5 GB for each 8,192 tokens, as much again for their gradients, and without flash-attn an operation for each token besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import calculate_sum_pi_squared_from_logits, entropy_from_logits
from verl.utils.ulysses import ulysses_pad_and_slice_inputs
from verl.workers.engine.utils import pad_packed_inputs

from trainer.optim.process import LOGITS_CHUNK


def keep_trained_logits(engine: Any) -> None:
    """Make an engine apply its model's head to trained tokens alone, in every pass from now on.

    Passes flagged `measure_entropy` return `measured_entropy` (nats), without a gradient, jagged as their log_probs.
    """
    _TrainedLogits(engine)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Tokens of a pass that the head is applied to. Arrays have one element for each."""

    hidden: torch.Tensor
    """Places of their hidden states among all that the model computes, padding between rows included."""
    positions: torch.Tensor
    """Places among the tokens of this process."""
    temperature: torch.Tensor


class _TrainedLogits:
    """One engine's passes, each of three calls of verl's: inputs are prepared, the model is called, outputs are prepared."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._prepare_inputs = engine.prepare_model_inputs
        self._kept: _Kept | None = None
        """Tokens of the pass that goes on. None: the model is called for another purpose."""
        engine.prepare_model_inputs, engine.prepare_model_outputs = self._inputs, self._outputs
        engine.module.get_output_embeddings().register_forward_pre_hook(self._select)

    def _inputs(self, micro_batch: Any) -> Any:
        model_inputs, output_args = self._prepare_inputs(micro_batch=micro_batch)
        trained = _next_is_trained(micro_batch)
        if "temperature_rmpad" in output_args:
            positions = _places(self._own(trained))
            self._kept = _Kept(positions, positions, output_args["temperature_rmpad"][positions])
        else:
            offsets, longest = micro_batch["input_ids"].offsets(), model_inputs["input_ids"].shape[1]
            positions = _places(trained)
            row = torch.searchsorted(offsets, positions, right=True) - 1
            self._kept = _Kept(row * longest + positions - offsets[row], positions, output_args["temperature"][row])
        return model_inputs, output_args

    def _select(self, _head: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return (1, kept, hidden size) of the head's input, which is (rows, longest, hidden size) or packed (1, tokens, hidden size)."""
        if self._kept is None:
            return inputs
        return (inputs[0].flatten(0, 1)[self._kept.hidden][None], *inputs[1:])

    def _own(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of one value a token, padded and cut as verl does with the tokens."""
        engine, padded = self._engine, values[None]
        if static := engine._get_packed_pad_size(len(values)):
            padded, _ = pad_packed_inputs(padded, None, static)
        if engine.use_ulysses_sp:
            padded, _, _ = ulysses_pad_and_slice_inputs(padded, position_ids_rmpad=None, sp_size=engine.ulysses_sequence_parallel_size)
        return padded[0]

    def _outputs(self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any) -> dict[str, Any]:
        """Return jagged outputs of a pass; at each position that of the next token."""
        kept, self._kept = self._kept, None
        assert kept is not None
        logits = (output.logits.full_tensor() if isinstance(output.logits, DTensor) else output.logits).squeeze(0)
        temperature = kept.temperature.clamp(min=1e-8).to(logits.dtype)[:, None]

        def flagged(name: str) -> bool:
            return bool(tu.get_non_tensor_data(micro_batch, key=name, default=False))

        values: dict[str, torch.Tensor] = {}
        if flagged("measure_entropy"):
            values["measured_entropy"] = _measured_entropy(logits, temperature)
        if flagged("calculate_entropy"):
            values["entropy"] = entropy_from_logits(logits / temperature)
        if flagged("calculate_sum_pi_squared"):
            values["sum_pi_squared"] = calculate_sum_pi_squared_from_logits(logits / temperature)
        labels = output_args["input_ids_rmpad_rolled"]
        values["log_probs"] = token_logprobs(logits, labels[kept.positions], temperature)
        return {name: self._jagged(value, kept.positions, len(labels), output_args, micro_batch) for name, value in values.items()}

    def _jagged(self, value: torch.Tensor, positions: torch.Tensor, own: int, output_args: Any, micro_batch: Any) -> torch.Tensor:
        whole = value.new_zeros(own).index_put((positions,), value)
        if "pad_size" in output_args:
            whole = self._engine._gather_and_unpad_packed(whole, output_args["pad_size"])
        return torch.nested.nested_tensor_from_jagged(whole, micro_batch["input_ids"].offsets())


def _next_is_trained(micro_batch: Any) -> torch.Tensor:
    """Return for each token of all rows whether the next is trained, as 0 or 1; a row's last position has the next row's first token: 0."""
    mask = micro_batch["loss_mask"]
    if mask.is_nested:
        flat = mask.values()
    else:  # of responses, padded on the right
        attention, width = micro_batch["attention_mask"], micro_batch["prompts"].shape[1]
        flat = torch.cat([torch.zeros_like(attention[:, :width]), mask.to(attention.dtype)], dim=1)[attention.bool()]
    return torch.roll(flat, shifts=-1, dims=0).long()


def _places(trained: torch.Tensor) -> torch.Tensor:
    """Return where values are not 0; the first place where all are, so that a pass has a gradient (of 0) on every rank."""
    places = trained.nonzero()[:, 0]
    return places if len(places) else places.new_zeros(1)


@torch.no_grad()
def _measured_entropy(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return the entropy (nats) of each distribution; logits (tokens, vocabulary), temperature (tokens, 1)."""
    entropy = torch.empty(len(logits), device=logits.device)
    for part in _parts(logits):
        logprobs = (logits[part].float() / temperature[part]).log_softmax(-1)
        entropy[part] = -(logprobs.exp() * logprobs).sum(-1)
    return entropy


def token_logprobs(logits: torch.Tensor, labels: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return the logprobs (nats) of labels.

    The backward pass puts the gradient in the logits' place: it must be the last that reads them.

    Args:
        logits: (tokens, vocabulary), float32.
        labels: (tokens,).
        temperature: of the softmax; (tokens, 1), float32.
    """
    return _TokenLogprobs.apply(logits, labels, temperature)  # pyright: ignore[reportReturnType]


class _TokenLogprobs(torch.autograd.Function):
    """y[label] - log sum exp y for y = x / T, and its gradient (onehot(label) - softmax(y)) / T by x, some tokens at a time."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        sums = torch.cat([(logits[part] / temperature[part]).logsumexp(-1, keepdim=True) for part in _parts(logits)])
        ctx.save_for_backward(logits, labels, temperature, sums)
        return (logits.gather(-1, labels[:, None]) / temperature - sums)[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, labels, temperature, sums = ctx.saved_tensors
        scaled = gradients[0][:, None] / temperature
        for part in _parts(logits):
            logits[part].div_(temperature[part]).sub_(sums[part]).exp_().mul_(-scaled[part])
        return logits.scatter_add_(-1, labels[:, None], scaled), None, None


def _parts(logits: torch.Tensor) -> list[slice]:
    return [slice(at, at + LOGITS_CHUNK) for at in range(0, len(logits), LOGITS_CHUNK)]
