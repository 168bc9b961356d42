"""Served decodings: names become trees with levels of prompts, or beam searches, also scaled down."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from treegen.engine import Forced
from treegen.ir.errors import FormatError, TreegenError
from treegen.workloads.recorded_decodings import load_templates
from treegen.workloads.served_decodings import BeamDecoding, DraftDecoding, ForcedDecoding, served_decoding


def forced(text: str, data: Path | None = None) -> ForcedDecoding:
    found = served_decoding(text, data)
    assert isinstance(found, ForcedDecoding)
    return found


@pytest.mark.parametrize(
    ("text", "levels", "prompts", "width", "tokens"),
    [
        ("few-shot", 1, [4000], 20, 400),
        ("few-shot-20:steps=7", 1, [4000], 20, 7),
        ("few-shot-30", 1, [4000], 30, 400),
        ("few-shot-50", 1, [4000], 50, 400),
        ("grpo", 1, [1000] * 8, 16, 500),
        ("grpo:prompts=2,samples=3,prompt=50,tokens=6", 1, [50] * 2, 3, 6),
        ("system-prompts", 4, [459 + 38 + 584 + 2112] * 32, 4, 256),
        ("shot-sets", 2, [3193 + 3000] * 8, 16, 256),
        ("chains", 2, [3193 + 64] * 32, 4, 256),
        ("documents", 2, [4000] * 16, 8, 256),
        ("70(5*3)+60(4)", 1, [70, 60], 3, 5),
    ],
)
def test_names(text: str, levels: int, prompts: list[int], width: int, tokens: int) -> None:
    found = forced(text)
    assert (found.name, found.prompt_levels) == (text, levels)
    controller = Forced(found.tree, 97, prompt_levels=levels)
    assert list(map(len, controller.prompts)) == prompts
    assert (controller.width, controller.max_new_tokens) == (width, tokens)
    assert found.most_tokens == max(prompts) + tokens


def test_requests_of_fasttree() -> None:
    for name in ("system-prompts", "shot-sets", "chains", "documents"):
        assert forced(name).tree.num_rows == 128
    tree = forced("system-prompts").tree
    assert tree.tokens[:4].tolist() == [459, 38, 38, 584]


def test_a_generated_search_is_replayed_as_a_whole() -> None:
    found = forced("reasoning:seed=3,depth=2,width=4,prompt=30,thought=6")
    assert len(found.tree.parent) == 1 + 2 * 4


def test_beams() -> None:
    assert served_decoding("beams") == BeamDecoding("beams", 32, 8000, 200)
    made = served_decoding("beams:width=4,tokens=30")
    assert made.scaled(0.1) == BeamDecoding("beams:width=4,tokens=30", 4, 800, 3)
    assert made.most_tokens == 8030


def test_scaled_trees_keep_their_form() -> None:
    found = forced("100(20(5*3)*2,0(1))").scaled(0.1)
    assert found.tree.tokens.tolist() == [10, 2, 1, 1, 1, 2, 1, 1, 1, 0, 1]
    assert forced("grpo").scaled(1).tree.tokens.tolist() == forced("grpo").tree.tokens.tolist()


@pytest.mark.parametrize("scale", [0, -1, 1.5, float("nan")])
def test_scales_that_are_refused(scale: float) -> None:
    with pytest.raises(FormatError, match="scale"):
        forced("grpo").scaled(scale)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("grpo:samples=x", "not a whole number"),
        ("grpo:sample=3", "has no option 'sample'"),
        ("grpo:samples=0", "samples = 0: is not a positive integer"),
        ("beams:width=0", "width = 0: is not a positive integer"),
        ("reasoning-sorting", "no folder is given; name the folder of recorded trees with --data or TREEGEN_DATA"),
        ("reasoning-thoughts", "expected a number of tokens"),
    ],
)
def test_what_is_refused(text: str, reason: str) -> None:
    with pytest.raises(TreegenError, match=reason):
        served_decoding(text)


def test_recorded_nodes_begin_when_their_parents_end(data_dir: Path) -> None:
    """So a replay of the tree has the rows of the record in every step; no step reads the last token of a branch."""
    for name in ("sorting128", "docmerge", "keyword"):
        for template in load_templates(data_dir / "deft" / f"reasoning_{name}.json"):
            above = np.maximum(template.parent, 0)
            assert (template.start == np.where(template.parent < 0, template.start, template.end[above] + 1)).all()


def test_recorded_trees(data_dir: Path) -> None:
    for name, nodes in (("sorting", 101), ("docmerge", 31), ("keyword", 61)):
        assert len(forced(f"reasoning-{name}", data_dir).tree.parent) == nodes
    assert len(forced("reasoning-sorting:0", data_dir).tree.parent) == 11
    with pytest.raises(FormatError, match=r"none of the 50 trees; write reasoning-docmerge:0 to reasoning-docmerge:49"):
        served_decoding("reasoning-docmerge:50", data_dir)


@pytest.mark.parametrize(("text", "tokens"), [("speculative", 64), *((f"speculative-{n}", n) for n in (32, 128, 256))])
def test_recorded_drafts(text: str, tokens: int, data_dir: Path) -> None:
    found = served_decoding(f"{text}:prompts=3,prompt=500", data_dir)
    assert isinstance(found, DraftDecoding)
    assert (found.prompts, found.prompt, len(found.parents), len(found.accepted)) == (3, 500, tokens - 1, 401)
    assert all(-1 <= parent < draft for draft, parent in enumerate(found.parents))
    assert found.most_tokens == 500 + 1 + 1738 + tokens - 1
    short = found.scaled(0.01)
    assert (short.prompt, short.parents, short.accepted) == (5, found.parents, found.accepted[:4])


def test_files_that_hold_no_drafts(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"has no deft/speculative_32.json; name the folder"):
        served_decoding("speculative-32", tmp_path)
    (tmp_path / "deft").mkdir()
    (tmp_path / "deft" / "speculative_32.json").write_text(
        '{"parent": [-1, 0], "tokens": [3, 2], "start": [-2, 1], "end": [0, 2]}'
    )
    with pytest.raises(FormatError, match="holds no speculative decoding; give one with paths and accepted"):
        served_decoding("speculative-32", tmp_path)
    with pytest.raises(FormatError, match="prompts = 0: is not a positive integer"):
        DraftDecoding("drafts", 0, 5, (-1,), (1,))
