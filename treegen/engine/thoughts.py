"""Search: tree of thoughts, a breadth-first search that a scorer guides.

prompt ── 3 thoughts each ──▶ score ──▶ best 2 ── 3 thoughts each ──▶ score ──▶ best 2 ──▶ ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from treegen.engine.branch import Branch
from treegen.engine.control import Continuation, Frontier, Growth, Label, Next
from treegen.engine.engine_checks import checked_stop_ids
from treegen.engine.sampling import Sampling, check_sampling, select_next
from treegen.ir.arrays import positive_int
from treegen.ir.errors import InputError
from treegen.ir.scalars import is_finite


class _Rated(NamedTuple):
    """A candidate with its score. branch: its place among the branches that were rated; -1 for an answer that waits."""

    tokens: list[int]
    score: float
    branch: int


@dataclass(slots=True)
class _Level:
    """The thoughts that a prompt is at.

    begins: by a thought's label, the tokens before it, the prompt's included. answers: candidates that are complete.
    ended: labels and tokens of candidates whose last thought is complete.
    """

    begins: dict[Label, int]
    answers: list[_Rated]
    ended: list[tuple[Label, list[int]]] = field(default_factory=list)


class Search:
    """Searches a tree of thoughts level by level, and returns the best candidates of the last level.

    From each kept branch of a prompt `branching` thoughts are drawn. When all thoughts of the level are complete, a
    scorer rates the branches that they end; the best `width` go on, the others end. Of equal scores the first is
    better. Those of the best that `stop` takes for answers wait with their scores, and are among the best of later
    levels or are left out. The search of a prompt ends with the last level, or when all of the best are answers.

    A branch's label within the search is its prompt and the place of each of its thoughts among those of one parent.
    That label, the seed and the position alone decide the noise of a thought.

    Args:
        score: Rates the candidates of a level. It gets the tokens of the prompt, and a list of the tokens after the
            prompt for each candidate, in the order of their labels. It returns a finite number for each; more is
            better.
        width: Branches of a prompt that a level keeps.
        branching: Thoughts that are drawn from each of them. Without a temperature they are all the same.
        thought_tokens: Tokens at which a thought ends.
        depth: Levels.
        sampling: How tokens are drawn.
        stop_ids: Tokens that end a thought, each with itself as the last token.
        stop: Says whether a candidate is an answer, which no thought follows. It gets the tokens of the prompt, and
            those after it. By default no candidate is one before the last level.

    Attributes:
        kept: Branches of a prompt that a level keeps.
        width: The most branches of a prompt at a time, which are the candidates of a level.
        max_new_tokens: The most tokens after a prompt.

    Raises:
        InputError: A number is out of range, or, while the engine runs, the scores do not fit.
    """

    together = keeps_notes = True

    def __init__(
        self,
        score: Callable[[list[int], list[list[int]]], Sequence[float]],
        *,
        width: int,
        branching: int,
        thought_tokens: int,
        depth: int,
        sampling: Sampling | None = None,
        stop_ids: tuple[int, ...] = (),
        stop: Callable[[list[int], list[int]], bool] | None = None,
    ) -> None:
        if not callable(score):
            raise InputError("score", score, "is not a function", "give one of a prompt and its candidates")
        if stop is not None and not callable(stop):
            raise InputError("stop", stop, "is not a function", "give one of a prompt and a candidate, or None")
        self.kept = positive_int("width", width, InputError)
        self.branching = positive_int("branching", branching, InputError)
        self.thought_tokens = positive_int("thought_tokens", thought_tokens, InputError)
        self.depth = positive_int("depth", depth, InputError)
        self.width, self.max_new_tokens = self.kept * self.branching, self.depth * self.thought_tokens
        self.score, self.stop, self.stop_ids = score, stop, frozenset(checked_stop_ids(stop_ids))
        self.sampling = Sampling(temperature=1.0) if sampling is None else check_sampling(sampling)
        self._levels: dict[int, _Level] = {}  # by prompt

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""
        branches = frontier.branches
        rows, labels, resting = [], [], set()
        of_prompt: dict[int, list[int]] = {}
        for row in sorted(range(len(branches)), key=lambda row: branches[row].label):
            of_prompt.setdefault(branches[row].label[0], []).append(row)
        for prompt, own in of_prompt.items():
            if all(self._is_complete(branches[row]) for row in own):
                begun = self._begin(prompt, [branches[row] for row in own])
                rows += [own[place] for place, _ in begun]
                labels += [label for _, label in begun]
                continue
            for row in own:
                if self._is_complete(branches[row]):
                    resting.add(branches[row].number)
                else:
                    rows.append(row)
                    labels.append(branches[row].label)
        drawn = self.sampling.draw(frontier.logits[rows], labels, [len(branches[row].tokens) for row in rows])
        growth = self._growth(branches, list(zip(rows, labels, drawn, strict=True)))
        return growth._replace(resting=resting)

    def selects(self, branches: Sequence[Branch]) -> bool:
        """See Selecting. Thoughts that are complete wait for the others of their level, or are rated by `decide`."""
        return not any(self._is_complete(branch) for branch in branches)

    def select(self, frontier: Frontier) -> torch.Tensor:
        """See Selecting."""
        return select_next(self.sampling, frontier)

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        """See Selecting."""
        drawn = [(row, branch.label, token) for row, (branch, token) in enumerate(zip(branches, tokens, strict=True))]
        growth = self._growth(branches, drawn)
        going = [(branches[row], label, token) for row, label, token in drawn if growth.grown[branches[row].number]]
        complete = [each.number for each, label, token in going if self._ends(token, self._count(each, label) + 1)]
        return growth._replace(resting=complete)

    def _growth(self, branches: Sequence[Branch], drawn: Sequence[tuple[int, Label, int]]) -> Growth:
        """Returns what follows from tokens: each is for the branch in a row, and for a label."""
        grown: dict[int, list[Next]] = {branch.number: [] for branch in branches}
        for row, label, token in drawn:
            branch = branches[row]
            if len(label) > self.depth and self._ends(token, self._count(branch, label) + 1):
                self._levels[label[0]].ended.append((label, [*branch.new_tokens, token]))
            else:
                grown[branch.number].append(Next(token, label))
        of_prompt: dict[int, list[Branch]] = {}
        for branch in branches:
            of_prompt.setdefault(branch.label[0], []).append(branch)
        results = []
        for own in of_prompt.values():
            if not any(grown[branch.number] for branch in own):
                results += self._results(own[0])
        return Growth(grown, results)

    def _is_complete(self, branch: Branch) -> bool:
        """Says whether the prompt, or the branch's thought, is complete."""
        if len(branch.label) == 1:
            return True
        return self._ends(branch.tokens[-1], self._count(branch, branch.label))

    def _count(self, branch: Branch, label: Label) -> int:
        """Returns the tokens of the thought with this label that the branch has."""
        return len(branch.tokens) - self._levels[label[0]].begins[label]

    def _ends(self, token: int, count: int) -> bool:
        """Says whether this token, number `count` of a thought, is its last one."""
        return count >= self.thought_tokens or token in self.stop_ids

    def _begin(self, prompt: int, branches: list[Branch]) -> list[tuple[int, Label]]:
        """Begins the next level of a prompt; returns the place of the branch and the label of each new thought."""
        kept: list[int] = [0]
        answers: list[_Rated] = []
        if len(branches[0].label) > 1:
            waiting = self._levels[prompt].answers
            best = self._best(branches[0], waiting, [branch.new_tokens for branch in branches])
            given = branches[0].tokens[: branches[0].prompt]
            stops = [each.branch < 0 or self._is_answer(given, each.tokens) for each in best]
            answers = [each._replace(branch=-1) for each, stop in zip(best, stops, strict=True) if stop]
            kept = [each.branch for each, stop in zip(best, stops, strict=True) if not stop]
        begun = [(place, (*branches[place].label, thought)) for place in kept for thought in range(self.branching)]
        self._levels[prompt] = _Level({label: len(branches[place].tokens) for place, label in begun}, answers)
        return begun

    def _results(self, branch: Branch) -> list[Continuation]:
        """Returns the best candidates of the prompt of this branch, whose search ends."""
        prompt = branch.label[0]
        level = self._levels.pop(prompt)
        best = self._best(branch, level.answers, [tokens for _, tokens in sorted(level.ended)])
        return [Continuation((prompt, rank), tokens, score) for rank, (tokens, score, _) in enumerate(best)]

    def _is_answer(self, prompt: list[int], tokens: list[int]) -> bool:
        """Says whether no thought follows a candidate."""
        return self.stop is not None and bool(self.stop([*prompt], [*tokens]))

    def _best(self, branch: Branch, waiting: list[_Rated], candidates: list[list[int]]) -> list[_Rated]:
        """Returns the best of these candidates and of the answers that wait, for the prompt of this branch."""
        scores = self._scores(branch, candidates)
        rated = [
            _Rated(tokens, score, place) for place, (tokens, score) in enumerate(zip(candidates, scores, strict=True))
        ]
        return sorted([*waiting, *rated], key=lambda each: -each.score)[: self.kept]

    def _scores(self, branch: Branch, candidates: list[list[int]]) -> list[float]:
        """Returns the scores of candidates of the prompt of this branch."""
        if not candidates:
            return []
        given = self.score(branch.tokens[: branch.prompt], [list(tokens) for tokens in candidates])
        shape = tuple(getattr(given, "shape", (1,)))  # of a tensor [candidates], or [candidates, 1]
        if (
            not isinstance(given, Iterable)
            or isinstance(given, str | Mapping)
            or not shape
            or max(shape[1:], default=1) > 1
        ):
            found, fix = type(given).__name__, "return a number for each candidate"
            raise InputError("score()", found, "is no list of numbers", fix)
        scores = [_number(score) for score in given]
        if len(scores) != len(candidates):
            found, fix = f"{len(scores)} scores", "return one for each"
            raise InputError("score()", found, f"is not the number of candidates, {len(candidates)}", fix)
        for place, score in enumerate(scores):
            if not is_finite(score):
                raise InputError(f"score()[{place}]", score, "is not a finite number", "return one for each candidate")
        return [float(score) for score in scores]


def _number(score: Any) -> Any:
    """Returns the number in an array or a tensor of one; anything else as it is."""
    try:
        return score.item() if hasattr(score, "item") else score
    except (RuntimeError, ValueError):  # of several numbers
        return score
