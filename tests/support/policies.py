"""Inputs of the trainer in a test: settings by the fields' own names, rows of transitions, and the tiny policies that sampled them."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import BaseModel
from safetensors.numpy import load_file, save_file

from spangrad.settings import TrainerSettings
from spangrad.settings.trainer_service import LogprobAlarm
from spangrad.weights.adapters import PREFIX, WEIGHTS, A, AdapterFacts, B, adapter_facts, write_config
from trainer.credit.estimators import estimator
from trainer.data.source import Group
from trainer.ledger.ledger import Ledger
from trainer.ledger.skips import Skip, SkipReason

if TYPE_CHECKING:
    import torch

# `trainer_settings(loss__name="gspo")`: a field has the section before it where several sections have one of its name.

_SECTIONS = {name: cast("type[BaseModel]", field.annotation) for name, field in TrainerSettings.model_fields.items()}
_SECTIONS = {name: kind for name, kind in _SECTIONS.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def trainer_key(name: str) -> str:
    """Return the key below `trainer` of a field that one section has, or of `section__field`."""
    if "__" in name:
        return name.replace("__", ".", 1)
    sections = [section for section, kind in _SECTIONS.items() if name in kind.model_fields]
    if name in TrainerSettings.model_fields or not sections:
        return name
    if len(sections) > 1:
        raise ValueError(f"{name} is in the sections {sections}: write SECTION__{name}")
    return f"{sections[0]}.{name}"


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of the trainer's settings that hold these values."""
    tables: dict[str, Any] = {}
    for name, value in flat.items():
        section, _, field = trainer_key(name).partition(".")
        if field:
            tables.setdefault(section, {})[field] = value
        else:
            tables[section] = value
    return tables


group_relative = estimator(TrainerSettings())
"""GRPO's normalised advantage of each value within its group (https://arxiv.org/abs/2402.03300, section 4.1.2)."""


def trainer_settings(**flat: Any) -> TrainerSettings:
    """Return the trainer's settings with these values."""
    return TrainerSettings(**nested(flat))


def changed(settings: TrainerSettings, flat: Mapping[str, Any]) -> TrainerSettings:
    """Return the trainer's settings with these values replaced, which are not validated."""
    tables = {
        name: getattr(settings, name).model_copy(update=value) if name in _SECTIONS and isinstance(value, dict) else value
        for name, value in nested(flat).items()
    }
    return settings.model_copy(update=tables)


def transition_row(rollout: str, turn: int = 0, *, rewards: tuple[float, ...] = (), **changes: object) -> dict[str, object]:
    """A row of spangrad_internal.transitions as the trainer reads it; `changes` replace columns."""
    count = len(changes.get("Rewards.Value", rewards))  # type: ignore[arg-type]
    row: dict[str, object] = {
        "RunId": "run",
        "Mode": "train",
        "BuildSpec": "spec",
        "GroupId": "group",
        "TaskId": "task",
        "RolloutId": rollout,
        "Attempt": 0,
        "Revision": 0,
        "Turn": turn,
        "CallId": f"call-{rollout}-{turn}",
        "TraceId": f"trace-{rollout}",
        "SpanId": f"span-{rollout}-{turn}",
        "AgentName": "agent",
        "Components": ["agent"],
        "Tools": [],
        "Policy": "policy",
        "Model": "policy",
        "TransitionId": f"transition-{rollout}-{turn}",
        "Version": 0,
        "Versions.Start": [],  # Version sampled all of it
        "Versions.Version": [],
        "TokenizerHash": "tokenizer",
        "Temperature": 1.0,
        "Reshaping": "",
        "FinishReason": "stop",
        "PromptIds": [1, 2, 3],
        "ResponseIds": [4, 5],
        "Logprobs": [-0.5, -1.5],
        "Rewards.Name": ["reward"] * len(rewards),
        "Rewards.Value": list(rewards),
        "Rewards.CallId": [""] * count,
        "Rewards.Role": [""] * count,
        "Rewards.Turn": [turn] * count,
    }
    return {**row, **changes}


# Samples drawn from a model with transformers, so that their logprobs are true.

NO_ALARM = LogprobAlarm(mean=1e9, p99=1e9, pearson=-1, k3=1e9)
"""Limits that nothing exceeds, for rows whose logprobs are made up."""
PROMPT = (1, 4, 7, 11, 2, 1, 5)
"""`<|im_start|> user say CITY <|im_end|> <|im_start|> assistant` in the two-tools vocabulary; the fourth token is the city."""


def sampled_rows(model: Path, count: int, *, temperature: float, seed: int, length: int = 3, **changes: object) -> list[dict[str, object]]:
    """Rows of transitions with responses of 1 to `length` tokens."""
    rows: list[dict[str, object]] = []
    for i in range(count):
        prompt = [*PROMPT[:3], PROMPT[3] + i % 4, *PROMPT[4:]]
        response, logprobs = sample(model, prompt, 1 + i % length, temperature, seed=1000 * seed + i)
        facts = {"PromptIds": prompt, "ResponseIds": response, "Logprobs": logprobs, "Temperature": temperature}
        rows.append(transition_row(f"{seed}-{i}", **{**facts, **changes}))
    return rows


def chained(tiny_model: Path, count: int = 12, divisor: int = 1) -> Any:
    """Rollouts of two turns, the second of which is paid when its first token is odd."""
    rows: list[dict[str, object]] = []
    for at, row in enumerate(sampled_rows(tiny_model, 2 * count, temperature=1.0, seed=5)):
        i, turn = divmod(at, 2)
        worth = float(turn and row["ResponseIds"][0] % 2)  # type: ignore[index]
        paid = transition_row(f"r{i:02}", turn, rewards=(worth,))
        rewards = {name: value for name, value in paid.items() if name.startswith("Rewards.")}
        rows.append({**row, "RolloutId": f"r{i:02}", "Turn": turn, "CallId": f"{i}-{turn}", "GroupId": "ab"[i >= count // 2], **rewards})
    from trainer.data.batch import layout
    from trainer.data.chains import chains
    from trainer.data.merge import separate

    frame, rewards = chains(pl.DataFrame(rows), pl.repeat(value=True, n=len(rows), eager=True), {})
    return layout(separate(frame, pl.zeros(len(frame), eager=True)), lineage=[0], divisor=divisor, rewards=rewards)


def sampled_by(rows: pl.DataFrame, version: int) -> pl.DataFrame:
    """Rows of which all tokens were sampled by one version."""
    return rows.with_columns(pl.lit(version).alias("Version"), pl.lit([version]).alias("Versions.Version"))


def sample(model: Path, prompt: list[int], length: int, temperature: float, *, seed: int) -> tuple[list[int], list[float]]:
    """A response of `length` tokens, and the logprob of each."""
    response, logprobs = _sample(model, tuple(prompt), length, temperature, seed)
    return [*response], [*logprobs]


@lru_cache(maxsize=4096)
def _sample(model: Path, prompt: tuple[int, ...], length: int, temperature: float, seed: int) -> tuple[list[int], list[float]]:
    import torch

    rng = torch.Generator().manual_seed(seed)
    response: list[int] = []
    logprobs: list[float] = []
    for _ in range(length):
        after = distribution(model, [*prompt, *response], temperature)
        token = int(torch.multinomial(after.exp(), 1, generator=rng))
        response.append(token)
        logprobs.append(float(after[token]))
    return response, logprobs


def logprobs_of(model: Path, prompt: list[int], response: list[int], temperature: float = 1.0) -> list[float]:
    """Logprob of each token of a response under a model."""
    import torch

    with torch.inference_mode():
        logits = _load(model)(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(response, dtype=torch.long)[:, None]
    return (logits / temperature).log_softmax(-1).gather(1, chosen)[:, 0].tolist()


def distribution(model: Path, ids: list[int], temperature: float) -> Any:
    """Logprobs of all tokens that may follow."""
    import torch

    with torch.no_grad():
        return (_load(model)(torch.tensor([ids])).logits[0, -1] / temperature).log_softmax(-1)


def padded(rows: list[list[float]]) -> torch.Tensor:
    """Rows of different lengths in one tensor."""
    import torch

    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], batch_first=True)


@lru_cache(maxsize=8)
def _load(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    adapter = adapter_facts(model)
    if adapter is None:
        return AutoModelForCausalLM.from_pretrained(model)
    from peft import PeftModel

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(adapter.base), model)


# LoRA adapters with random weights, large enough to be told apart, and what PEFT computes with them.


def random_adapter(base: Path, directory: Path, *, seed: int, rank: int = 4, alpha: float = 6, scale: float = 0.05) -> Path:
    """An adapter of all linear layers but the head, with A and B drawn from a normal distribution."""
    rng = np.random.default_rng(seed)
    tensors = dict[str, np.ndarray]()
    for name, weight in load_file(base / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            rows, columns = weight.shape
            layer = PREFIX + name.removesuffix(".weight")
            tensors[layer + A] = (scale * rng.standard_normal((rank, columns))).astype(np.float32)
            tensors[layer + B] = (scale * rng.standard_normal((rows, rank))).astype(np.float32)
    directory.mkdir(parents=True)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    write_config(directory, AdapterFacts(base, rank, alpha), tensors)
    return directory


# What transformers says of the tokens that versions of a policy sampled, and versions that differ.


def perturbed(model: Path, directory: Path, factor: float = 1.25) -> Path:
    """Copy a model with its weights multiplied."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(model, directory)
    weights = {name: (value * factor).astype(value.dtype) for name, value in load_file(model / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Reference:
    """Models of several versions, in float32."""

    def __init__(self, versions: dict[int, Path]) -> None:
        """Load the directory of each version."""
        import torch
        from transformers import AutoModelForCausalLM

        self.models = {version: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for version, path in versions.items()}

    def gaps(self, row: dict[str, Any], version: int) -> NDArray[np.float64]:
        """Return |difference| of each response token's logprob (nats) between a row of `calls` and a version's weights."""
        import torch

        prompt, response = list(row["PromptIds"]), list(row["ResponseIds"])
        with torch.inference_mode():
            logits = self.models[version](torch.tensor([prompt + response])).logits[0]
        at = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)[torch.arange(len(response)), torch.tensor(response)]
        return np.abs(np.array(row["Logprobs"], np.float64) - at.numpy())

    def agrees(self, row: dict[str, Any], version: int) -> NDArray[np.bool_]:
        """Return for each response token whether its logprob is that of a version."""
        return self.gaps(row, version) < 1e-3


# A tiny model with random weights that spells in ASCII: enough to fill in JSON where a grammar holds its hand.

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)


def build_spelling_model(directory: Path) -> None:
    """Make the model and write it to `directory`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelled = [letters.pre_tokenize_str(one)[0][0] for one in CHARACTERS]
    vocabulary = {token: place for place, token in enumerate([*SPECIAL, *spelled])}
    words = Tokenizer(models.BPE(vocabulary, []))
    words.pre_tokenizer = letters
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,  # the least that vLLM's attention takes
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=vocabulary["<|im_end|>"],
            pad_token_id=vocabulary["<|endoftext|>"],
            dtype="float32",
        )
    )
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)


def skip(ledger: Ledger, groups: Iterable[Group], reason: SkipReason) -> None:
    """Skip groups in the step from the head."""
    head = ledger.frontier()
    ledger.skips.enter(dict.fromkeys(groups, Skip(reason)), head.version if head else 0)


def state_of(version: Path) -> dict[str, Any]:
    """Return the optimizer's state in a version's directory, its tensors whole, by name."""
    from torch.distributed.checkpoint.state_dict_loader import load

    from trainer.optim.states import sharded_state
    from trainer.publish.checkpoint import STATE

    state: dict[str, Any] = {name: sharded_state.empty(entry) for name, entry in sharded_state.entries(version / STATE).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a process that is alone
        load(state, checkpoint_id=version / STATE, no_dist=True)
    return state


def state_facts(version: Path) -> dict[str, Any]:
    """Return every tensor and number of a version's state but for the ranks' random states."""
    import torch

    facts = {name: value for name, value in state_of(version).items() if not name.startswith("random.")}
    return {name: torch.as_tensor(value) for name, value in facts.items() if isinstance(value, torch.Tensor | int | float)}
