"""Dataset classes for verl's supervised trainer that read our JSON lines unchanged: verl loads this file by `data.custom_cls.path`.

Items have the fields of verl's own MultiTurnSFTDataset. Invariant: exactly the replies of weight 1, or the tokens of mask 1, are trained;
`EngineTokens` never tokenises.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.utils.data import Dataset
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.tokenizer.chat_template import extract_system_prompt_and_generation

from spangrad.errors import JSON_ERRORS, BuilderError


class Conversations(MultiTurnSFTDataset):
    """Dataset of rows of `sft` that have messages; those of /v1/completions have none, and are an error."""

    def _read_files_and_process(self) -> None:
        rows = _rows(self.parquet_files, self.max_samples, self.shuffle, self.seed, "messages")
        # As text: a frame's columns would give every message the keys of all.
        self.dataframe = pd.DataFrame({self.messages_key: [json.dumps(row["messages"]) for row in rows]})
        self.messages = [row["messages"] for row in rows]
        self.tools = [row.get("tools") for row in rows]
        self.enable_thinking = None
        self.system_prompt, self.generation_prompt = extract_system_prompt_and_generation(self.tokenizer, **self.apply_chat_template_kwargs)

    def _build_messages(self, example: dict[str, Any]) -> list[dict[str, Any]]:
        return [_with_parsed_arguments(message) for message in json.loads(example[self.messages_key])]

    def _process_single_message(self, index: int, message: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        plain = {name: value for name, value in message.items() if name != "weight"}
        ids, loss_mask, attention_mask, inputs = super()._process_single_message(index, plain, *args, **kwargs)  # pyright: ignore[reportAssignmentType]  # verl's annotation forgets one
        return ids, loss_mask * message.get("weight", 1), attention_mask, inputs


class EngineTokens(Dataset[dict[str, torch.Tensor]]):
    """Dataset of rows of `sft-tokens`."""

    def __init__(self, parquet_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1) -> None:
        """Read the files; the parameters are those that verl passes."""
        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        self._rows = _rows(files, max_samples, config.get("shuffle", False), config.get("seed"), "input_ids")
        self._max_length: int = config.get("max_length", 1024)
        self._truncation: str = config.get("truncation", "error")
        self._is_padded: bool = config.get("pad_mode", "right") == "right"
        self._padding: int = tokenizer.pad_token_id or 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        ids, mask = (torch.tensor(self._rows[item][name], dtype=torch.long) for name in ("input_ids", "loss_mask"))
        length = len(ids)
        if length > self._max_length:
            if self._truncation == "error":
                raise BuilderError(
                    f"row {item} has {length} tokens, and data.max_length is {self._max_length}. Raise it, or set data.truncation."
                )
            kept = slice(-self._max_length, None) if self._truncation == "left" else slice(self._max_length)
            ids, mask, length = ids[kept], mask[kept], self._max_length
        if not self._is_padded:
            return {"input_ids": ids, "loss_mask": mask, "position_ids": torch.arange(length)}
        missing = (0, self._max_length - length)
        return {
            "input_ids": torch.nn.functional.pad(ids, missing, value=self._padding),
            "loss_mask": torch.nn.functional.pad(mask, missing),
            "position_ids": torch.nn.functional.pad(torch.arange(length), missing),
            "attention_mask": torch.nn.functional.pad(torch.ones(length, dtype=torch.long), missing),
        }


def _rows(files: list[str], most: int, shuffled: bool, seed: int | None, key: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for file in files:
        for number, line in enumerate(Path(file).read_text().split("\n"), 1):  # splitlines() would cut JSON at U+2028
            if line:
                row = json.loads(line)
                if key not in row:
                    raise BuilderError(
                        f"{file} has no {key} in line {number}. Give a file of the format that the class's description names."
                    )
                rows.append(row)
    if 0 < most < len(rows):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed or 0)).tolist() if shuffled else range(most)
        rows = [rows[index] for index in list(order)[:most]]
    return rows


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of tool calls as objects, as vLLM passes them to chat templates."""
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [_parsed(call) for call in message["tool_calls"]]}


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except JSON_ERRORS:
        return call
