"""GenerateRequest: what a call of Transformers' `generate` asks for, checked before anything is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from treegen.integrations.hf_checks import check_decoder, most_tokens
from treegen.ir.arrays import positive_int
from treegen.ir.errors import InputError

SERVED = ("greedy_search", "sample", "beam_search", "beam_sample", "assisted_generation")
"""The modes of Transformers that are served."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "use_cache": (None, True),
    "guidance_scale": (None, 1),
    "cache_implementation": (None, "dynamic"),
    "use_mtp": (None, False),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "low_memory": (None, False),
}
"""Fields of a generation config with values that are not served, and their values that are."""

KNOWN = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
"""Arguments for the model that Transformers adds itself."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A call of `generate`.

    Attributes:
        ids: `[rows, length]`; the prompts, padded at the left, each once for every row that it gets.
        prompts: The tokens of each prompt, without padding.
        width: Rows of each prompt.
        new_tokens: The most tokens after a prompt.
        mode: One of SERVED.
        config: The generation config.
        pad: The token of rows that have ended; None where they go on until all have.
        ends: The ids that end a row.
    """

    ids: torch.Tensor
    prompts: list[list[int]]
    width: int
    new_tokens: int
    mode: str
    config: Any
    pad: torch.Tensor | None
    ends: list[int]

    @property
    def fill(self) -> int:
        """The token after the last one of beams: Transformers takes the first end id where the padding token is 0."""
        pad = self.config._pad_token_tensor
        return (int(pad) if pad else self.ends[0]) if self.ends else -1

    @property
    def max_draft(self) -> int:
        """The most drafts of a step, 0 for steps without drafts."""
        return int(self.config.prompt_lookup_num_tokens) if self.mode == "assisted_generation" else 0


def check_request(
    model: Any, ids: torch.Tensor, stopping_criteria: Any, config: Any, model_kwargs: Mapping[str, Any]
) -> GenerateRequest:
    """Checks a call that Transformers has prepared.

    Args:
        model: The model.
        ids: `[rows, length]`; the prompts, each once for every row.
        stopping_criteria: The criteria, Transformers' own among them.
        config: The generation config.
        model_kwargs: Arguments for the model.

    Returns:
        The request.

    Raises:
        InputError: Something is asked for that is not served.
    """
    if model.config.is_encoder_decoder:
        raise InputError("model", type(model).__name__, "has an encoder", "give a decoder")
    for name in ("num_beams", "num_return_sequences"):
        if getattr(config, name) is not None:
            positive_int(name, getattr(config, name), InputError)
    if not ids.numel():
        raise InputError("input_ids", list(ids.shape), "has no tokens", "give each prompt at least one")
    mode = str(getattr(config.get_generation_mode(), "value", ""))
    if mode not in SERVED:
        raise InputError("generation mode", mode, "is not served", f"use one of {', '.join(SERVED)}")
    for name, neutral in NEUTRAL.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise InputError(name, value, "is not served", "leave it out, or leave out custom_generate")
    _check_arguments(model_kwargs)
    width = max(config.num_beams or 1, config.num_return_sequences or 1)
    mask = model_kwargs.get("attention_mask")
    prompts = _prompts(ids[::width], mask, width)
    _check_positions(ids, mask, model_kwargs.get("position_ids"))
    if mode == "assisted_generation":
        positive_int("prompt_lookup_num_tokens", config.prompt_lookup_num_tokens, InputError)
        if len(ids) > 1:
            reason = "is for one row, as in Transformers"
            raise InputError("prompt_lookup_num_tokens", config.prompt_lookup_num_tokens, reason, "give one prompt")
    longest = config.max_length if stopping_criteria.max_length is None else stopping_criteria.max_length
    new_tokens = int(longest) - ids.shape[1]
    most = most_tokens(check_decoder(model))
    if new_tokens < 1 or max(map(len, prompts)) + new_tokens > most:
        reason = f"with prompts of {ids.shape[1]} tokens, leaves no room or is over the model's {most}"
        raise InputError("max_length", longest, reason, "give another number of new tokens")
    pad = config._pad_token_tensor
    pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    if pads and pad is None:
        raise InputError("pad_token_id", None, "is needed where rows end by an id", "give one")
    ends = [] if config._eos_token_tensor is None else [int(token) for token in config._eos_token_tensor]
    return GenerateRequest(ids, prompts, width, new_tokens, mode, config, pad.to(ids.device) if pads else None, ends)


def _check_arguments(model_kwargs: Mapping[str, Any]) -> None:
    """Raises InputError for arguments of the model that the engine does not hand on, and for caches in use."""
    given = {name for name, value in model_kwargs.items() if value is not None and value is not False}
    if unknown := sorted(given - set(KNOWN)):
        reason, fix = "is not handed to the model by treegen's engine", "leave it out, or leave out custom_generate"
        raise InputError(unknown[0], type(model_kwargs[unknown[0]]).__name__, reason, fix)
    cache = model_kwargs.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
        raise InputError("past_key_values", type(cache).__name__, "is not used: the engine has pages", "leave it out")


def _check_positions(ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> None:
    """Raises InputError for positions `[rows, length]` that do not count the tokens of each prompt from 0."""
    if positions is None:
        return
    counted = torch.ones_like(ids) if mask is None else (mask != 0).long()
    expected = (counted.cumsum(-1) - 1) * counted
    if positions.shape[-1] != ids.shape[1] or bool(((positions - expected) * counted).any()):
        reason = "are not those that the mask implies"
        raise InputError("position_ids", list(positions.shape), reason, "leave them out")


def _prompts(ids: torch.Tensor, mask: torch.Tensor | None, width: int) -> list[list[int]]:
    """Returns the tokens of each prompt `[prompts, length]`, by a mask that has `width` rows for each."""
    if mask is None:
        return [list(map(int, row)) for row in ids.tolist()]
    if mask.shape != (len(ids) * width, ids.shape[1]):
        raise InputError("attention_mask", list(mask.shape), "has not the shape of input_ids", "give one of 0 and 1")
    kept = (mask[::width] != 0).int()
    if not bool(kept.any(dim=1).all()):
        reason = "has a row of zeros, which is a prompt without tokens"
        raise InputError("attention_mask", kept.tolist(), reason, "give each prompt at least one token")
    if bool((kept.diff(dim=1) < 0).any()) or not bool(kept[:, -1].all()):
        reason = "has zeros after ones; only padding at the left is served"
        fix = 'pass attention_mask, and give the tokenizer padding_side="left"'
        raise InputError("attention_mask", kept.tolist(), reason, fix)
    counts = kept.sum(1).tolist()
    return [list(map(int, row[len(row) - count :])) for row, count in zip(ids.tolist(), counts, strict=True)]
