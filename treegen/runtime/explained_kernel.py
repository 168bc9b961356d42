"""What kernels of all kinds tell about their plans: a text, a page, and their form in notebooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from treegen.ir.errors import InputError
from treegen.report.explain import Explanation, compared
from treegen.report.page.notebook import framed
from treegen.text_files import save_text


class ExplainedKernel(ABC):
    """A kernel that explains its plan."""

    @abstractmethod
    def _explanation(self) -> tuple[str, Explanation]:
        """Returns a heading, which may be empty, and the explanation. Raises InputError where there is no plan."""

    def explain(self, groups: int = 0, formulas: bool = False, html: str | Path | None = None) -> str:
        """Describes the tree, the plan and its account.

        In batch-invariant mode the text also has the plan that `auto` would choose, and compares the estimated times.

        Args:
            groups: The most groups of the plan to list.
            formulas: Whether to print the formulas of the cost model.
            html: A file to write a page to, which draws the plan beside those of all strategies. It needs no network.

        Returns:
            A text of several lines.

        Raises:
            InputError: A kernel for running batches has no plan yet, because there was no `update`.
            FormatError: The file cannot be written.
        """
        heading, explanation = self._explanation()
        if html is not None:
            save_text(html, compared(explanation).to_html())
        return heading + explanation.text(groups, formulas)

    def _repr_html_(self) -> str | None:
        """Returns the page of the kernel's plan for notebooks; None where there is no plan."""
        try:
            _, explanation = self._explanation()
        except InputError:
            return None
        return framed(explanation.to_html())
