"""Sampling: next tokens from logits, with noise that depends on nothing but seed, label and position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from treegen.backends.devices import on_device
from treegen.engine.control import Frontier
from treegen.ir.errors import InputError
from treegen.ir.scalars import is_finite, plain_number

_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-20, 1e30
"""Temperatures above 0 lie between these. They, and logits below 1e18 over them, are finite in fp32."""
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""The last bits of an fp32 number that are 0 for all numbers of a type."""
_TILE = 16384
"""The logits that a thread block reads at a time."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn from logits.

    A token is the first whose cumulated probability, by `logits / temperature` over the tokens that `top_k` and `top_p`
    leave, exceeds a uniform number. The number follows from the seed, the branch's label and the position alone, so a
    branch's tokens do not depend on who else is in the batch.

    Args:
        temperature: Divides logits, 1e-20 to 1e30; 0 takes the most likely token.
        top_k: Keeps this many of the most likely tokens; 0 keeps all.
        top_p: Keeps the most likely tokens whose probabilities first sum up to this; 1 keeps all.
        seed: Decides the noise.

    Raises:
        InputError: A number is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "seed"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        if not (is_finite(self.temperature) and self.temperature >= 0):
            raise InputError("temperature", self.temperature, "is not a finite number of at least 0", "give one")
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            reason = "is so low that logits over it are infinite"
            raise InputError("temperature", self.temperature, reason, "give 0 for the most likely tokens")
        if self.temperature > _MOST_TEMPERATURE:
            reason = "is so high that all tokens are equally likely"
            raise InputError("temperature", self.temperature, reason, f"give at most {_MOST_TEMPERATURE:.0e}")
        if type(self.top_k) is not int or self.top_k < 0:
            raise InputError("top_k", self.top_k, "is not a number of tokens", "give 0 for all, or at least 1")
        if not (is_finite(self.top_p) and 0 < self.top_p <= 1):
            raise InputError("top_p", self.top_p, "is not a probability above 0", "give 1 for all tokens")
        if type(self.seed) is not int or self.seed < 0:
            raise InputError("seed", self.seed, "is not an integer of at least 0", "give one")

    def draw(self, logits: torch.Tensor, labels: Sequence[tuple[int, ...]], positions: Sequence[int]) -> list[int]:
        """Draws a token for each row of logits.

        Args:
            logits: `[rows, vocabulary]`.
            labels: The label of the branch that each row's token is for.
            positions: The position of the token.

        Returns:
            The token of each row.

        Raises:
            InputError: A row of logits has NaN, or no finite number, so that there is no probability to draw by.
        """
        tokens = list(map(int, self.select(logits, labels, positions).tolist()))
        if tokens and max(tokens) >= logits.shape[1]:
            row = f"logits[{tokens.index(max(tokens))}]"
            raise InputError(row, "NaN or -inf", "gives tokens no probabilities", "look for NaN in the model's weights")
        return tokens

    def select(self, logits: torch.Tensor, labels: Sequence[tuple[int, ...]], positions: Sequence[int]) -> torch.Tensor:
        """Draws tokens as `draw` does, without waiting for the device; returns them there, int64 `[rows]`.

        Where a row has no probabilities to draw by, the token is the number of tokens, which is none of them.
        """
        if not self.temperature:
            tokens = logits.argmax(-1)  # of NaN, if there is any
            return torch.where(logits.gather(-1, tokens[:, None])[:, 0] > -torch.inf, tokens, logits.shape[1])
        noise = [self._noise(label, position) for label, position in zip(labels, positions, strict=True)]
        uniform = torch.tensor(noise, dtype=torch.float64).to(logits.device, non_blocking=True)
        draws = launch_draws if logits.device.type == "cuda" else plain_draws
        return draws(logits, uniform, self)

    def _noise(self, label: tuple[int, ...], position: int) -> float:
        """Returns a number of at least 0 and below 1."""
        text = ",".join(map(str, (self.seed, position, *label)))
        return (int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 11) / 2**53


def select_next(sampling: Sampling, frontier: Frontier) -> torch.Tensor:
    """Selects the next token of each branch of a frontier that has no drafts, as `Sampling.select` does."""
    labels = [branch.label for branch in frontier.branches]
    return sampling.select(frontier.logits, labels, [len(branch.tokens) for branch in frontier.branches])


def plain_draws(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Draws tokens by operations of PyTorch.

    Args:
        logits: `[rows, vocabulary]`.
        uniform: float64 `[rows]`; the number of each row, at least 0 and below 1.
        sampling: How tokens are drawn, with a temperature.

    Returns:
        As `Sampling.select`.
    """
    scores = kept(logits.float() / sampling.temperature, sampling.top_k, sampling.top_p)
    cumulated = scores.double().softmax(-1).cumsum(-1)
    return torch.searchsorted(cumulated, uniform[:, None] * cumulated[:, -1:], right=True)[:, 0]


def launch_draws(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Does what `plain_draws` does in one launch, on a GPU or in Triton's interpreter."""
    from treegen.backends import sampling_kernels

    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    with on_device(logits.device):
        sampling_kernels.draw_tokens[(rows,)](
            logits, uniform, tokens, vocabulary, logits.stride(0), float(sampling.temperature),
            min(sampling.top_k, vocabulary), float(sampling.top_p), 0 < sampling.top_k < vocabulary, sampling.top_p < 1,
            _UNUSED_BITS.get(logits.dtype, 0), _TILE, num_warps=32,
        )  # fmt: skip
    return tokens


def check_sampling(sampling: object) -> Sampling:
    """Returns it. Raises InputError for something else, for instance a temperature."""
    if not isinstance(sampling, Sampling):
        raise InputError("sampling", sampling, "is not a Sampling", "give Sampling(temperature=0.8), for instance")
    return sampling


def kept(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Returns scores `[rows, vocabulary]` with -inf for the tokens that top_k and then top_p leave out.

    Tokens with equal scores stay or go together.
    """
    ordered = None
    if 0 < top_k < scores.shape[1]:
        ordered = scores.topk(top_k).values  # descending
        scores = scores.masked_fill(scores < ordered[:, -1:], -torch.inf)
    if top_p < 1:
        if ordered is None:
            ordered = scores.sort(descending=True).values
        probabilities = (ordered - scores.logsumexp(-1, keepdim=True)).exp()
        before = probabilities.cumsum(-1) - probabilities
        least = ordered.masked_fill((before >= top_p) & (before > 0), torch.inf).amin(-1, keepdim=True)
        scores = scores.masked_fill(scores < least, -torch.inf)
    return scores
