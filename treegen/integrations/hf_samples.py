"""Controllers of samples for models of Transformers: rows in step with one another, and a row with drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from treegen.engine import Branch, DraftTree, Frontier, Growth, Next, NGrams
from treegen.engine.graphs import chosen_rows
from treegen.engine.host_copy import HostCopy
from treegen.integrations.hf_requests import GenerateRequest
from treegen.integrations.hf_rules import TokenRules, resting, rows_of, spread


class LockstepSample:
    """Gives all rows of a call a token in each step, as Transformers' own loop does.

    Rows whose logits come early wait for the others, so tokens are drawn once a step, for all rows. A row that has
    ended gets the padding token; its branch ends, unless its further scores are to be returned.

    Args:
        rules: Choose the tokens.
        request: What was asked for.

    Attributes:
        ids: `[rows, length]`; the tokens so far, with those of the prompts.
    """

    together = True

    def __init__(self, rules: TokenRules, request: GenerateRequest) -> None:
        self.rules, self.ids = rules, request.ids
        self.width, self.max_new_tokens = request.width, request.new_tokens
        self._pad = request.pad
        self._keeps_all = request.pad is None or rules.scores is not None or rules.logits is not None
        self._unfinished = torch.ones(len(self.ids), dtype=torch.bool, device=self.ids.device)
        self._running, self._going = len(request.prompts), HostCopy(self._unfinished)

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""
        if len(frontier.branches) < self._running:
            return resting(frontier)
        return self._growth(frontier.branches, self._advance(frontier).tolist())

    def selects(self, branches: Sequence[Branch]) -> bool:
        """See Selecting. The first token of a prompt may fork."""
        return len(branches) == self._running and all(len(branch.label) > 1 for branch in branches)

    def select(self, frontier: Frontier) -> torch.Tensor:
        """See Selecting."""
        rows = [rows_of(branch, self.width)[0] for branch in frontier.branches]
        return chosen_rows(self._advance(frontier).to(frontier.logits.device), rows)

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        """See Selecting."""
        chosen = [0] * len(self.ids)
        for branch, token in zip(branches, tokens, strict=True):
            chosen[rows_of(branch, self.width)[0]] = token
        return self._growth(branches, chosen)

    def _advance(self, frontier: Frontier) -> torch.Tensor:
        """Gives each row its next token; returns them, `[rows]`, without waiting for them."""
        logits = spread(frontier.branches, frontier.logits, self.width, self.ids)
        tokens = self.rules.chosen(self.rules.scored(self.ids, logits))
        if self._pad is not None:
            tokens = torch.where(self._unfinished, tokens, self._pad)
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        self._unfinished &= ~self.rules.ended(self.ids)
        self._going = HostCopy(self._unfinished.clone())
        return tokens

    def _growth(self, branches: Sequence[Branch], tokens: list[int]) -> Growth:
        """Decides which branches go on. tokens: the next one of each row."""
        self.rules.stream(torch.tensor(tokens))
        going: list[bool] = self._going.read().tolist()
        if any(going) and self._keeps_all:
            going = [True] * len(going)
        self._running = sum(going)
        grown = {
            branch.number: [
                Next(tokens[row], (branch.label[0], row % self.width))
                for row in rows_of(branch, self.width)
                if going[row]
            ]
            for branch in branches
        }
        return Growth(grown, [])


class DraftedSample:
    """Gives the one row of a call the tokens that it gets without drafts, in fewer steps where drafts are right.

    The tokens of a step are chosen one after another, each from processed scores, up to the first that is not the
    draft. So tokens are drawn in the same order as without drafts.

    Args:
        rules: Choose the tokens.
        request: What was asked for.
        drafter: Proposes tokens.
        max_draft: The most drafts of a step.

    Attributes:
        ids: `[1, length]`; the tokens so far, with those of the prompt.
    """

    together, width, draft_trees = False, 1, False

    def __init__(self, rules: TokenRules, request: GenerateRequest, drafter: NGrams, max_draft: int) -> None:
        self.rules, self.ids = rules, request.ids
        self.max_draft, self.max_new_tokens = max_draft, request.new_tokens
        self._drafter = drafter

    def draft(self, branches: Sequence[Branch]) -> list[DraftTree]:
        """See Drafting. There are `max_draft` of them in each step, as in Speculate."""
        drafts = self._drafter([branch.tokens for branch in branches], self.max_draft)
        return [own.filled(self.max_draft, branch.tokens[-1]) for branch, own in zip(branches, drafts, strict=True)]

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""
        (branch,) = frontier.branches
        drafts = branch.tokens[len(branch.tokens) - branch.drafts :]
        logits = frontier.logits.to(self.ids.device, torch.float32, copy=True)
        for place, row in enumerate(logits):
            tokens = self.rules.chosen(self.rules.scored(self.ids, row[None]))
            self.ids = torch.cat([self.ids, tokens[:, None]], 1)
            self.rules.stream(tokens)
            token, ended = int(tokens), bool(self.rules.ended(self.ids))
            if ended or place == len(drafts) or token != drafts[place]:
                break
        following = [] if ended else [Next(token, branch.label)]
        return Growth({branch.number: following}, [], {branch.number: range(place)})
