"""Kernels as pages: files that draw their plans, and their form in notebooks."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
import torch

import treegen
from support.browsers import Visits
from treegen import Shape, Tree
from treegen.ir.errors import FormatError, InputError

SHAPE = Shape(4, 2, 64, dtype="fp32")
TREE = Tree.parse("100(10*4)")


def test_a_kernel_writes_a_page_beside_all_strategies(visit: Visits, tmp_path: Path) -> None:
    kernel = treegen.compile(TREE, strategy="deft-node", shape=SHAPE, backend="torch")
    page = tmp_path / "kernel.html"
    assert kernel.explain(html=page) == kernel.explain()
    tab = visit(page.read_text("utf-8"))
    names = tab.eval_on_selector_all(".strategy b", "all => all.map(each => each.textContent)")
    assert {"deft-node", "query", "fasttree"} <= set(names)
    with pytest.raises(FormatError, match="cannot be written"):
        kernel.explain(html=tmp_path / "missing" / "kernel.html")


def test_notebooks_show_kernels_in_a_frame(visit: Visits) -> None:
    kernel = treegen.compile(TREE, strategy="deft-node", shape=SHAPE, backend="torch")
    shown = kernel._repr_html_()
    assert shown is not None
    page = html.unescape(re.search(r'srcdoc="([^"]*)"', shown)[1])
    tab = visit(page)
    assert "Shown below: deft-node" in tab.inner_text("#summary")
    assert (
        visit(f"<meta charset='utf-8'>{shown}").frame_locator("iframe").locator("h1").inner_text() == "tree 1,4/100,10"
    )


def test_batch_kernels_have_pages_after_an_update() -> None:
    table = torch.arange(8, dtype=torch.int32).reshape(2, 4)
    pages = treegen.PageTable(table, torch.tensor([40, 40], dtype=torch.int32), 8)
    kernel = treegen.compile_batch(Shape(4, 2, 64, dtype="fp32", page_size=16), pages, max_tokens=64, backend="torch")
    assert kernel._repr_html_() is None
    with pytest.raises(InputError, match="has nothing to explain; call update first"):
        kernel.explain()
    batch = treegen.LiveBatch(page_size=16)
    batch.add(tokens=40)
    batch.add(tokens=40)
    kernel.update(batch)
    assert "srcdoc" in kernel._repr_html_()
