"""Fork places: gives continuations of beams the places of the beams that they continue, and of those that end."""

from __future__ import annotations

import torch

from treegen.engine.control import Selection


def in_places(places: torch.Tensor, beams: torch.Tensor, tokens: torch.Tensor) -> Selection:
    """Gives each continuation a place, without waiting for the device.

    The first continuation of a beam stays in its place; each other one takes the place of a beam that has none.

    Args:
        places: int64 `[prompts, width]`; the place of each beam in the batch, each place 0 .. prompts * width - 1 once.
        beams: int64 `[prompts, width]`; the beam that each continuation continues, by its number in the prompt.
        tokens: int64 `[prompts, width]`; its token.

    Returns:
        The token in each place, and the place of the beam that it continues.
    """
    begins = (beams[:, :, None] == beams[:, None, :]).tril(-1).any(2).logical_not()
    ends = torch.ones_like(beams).scatter(1, beams, 0)
    free = ends.sort(dim=1, descending=True, stable=True).indices
    number = begins.logical_not().cumsum(1).sub(1).clamp(min=0)  # of a fork among those of its prompt
    taken = torch.where(begins, beams, free.gather(1, number))
    into = places.gather(1, taken).flatten()
    return Selection(*(
        torch.empty_like(into).scatter(0, into, chosen.flatten()) for chosen in (tokens, places.gather(1, beams))
    ))  # fmt: skip
