"""Neighbours in registers: which layouts of tiles hold them. Every kernel that is compiled ahead of time is asked."""

import pytest

from treegen.codegen.register_layout import check_pairs
from treegen.ir.errors import BackendError

INSTRUCTION = (
    '%1 = tt.elementwise_inline_asm "@p st.global.v2.f32 [$2], {$4, $5};" {packed_element = 2 : i32} %a, %b, %c'
    " : tensor<64x128xi64, #own>, tensor<64x128xf32, #own>, tensor<64x128xi32, #own> -> tensor<64x128xi32, #own> loc(#1"
)


class Compiled:
    """What a compiled kernel has of interest here."""

    def __init__(self, layout: str, instruction: str = INSTRUCTION) -> None:
        self.asm = {"ttgir": f"#other = 1\n#own = {layout}\nmodule {{\n  {instruction}\n}}\n"}


@pytest.mark.parametrize(
    "layout",
    [
        "#ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 128, 16]}>",
        "#ttg.linear<{register = [[0, 1], [0, 2]], lane = [[1, 0]], warp = [[16, 0]], block = []}>",
        "#ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [2, 16], warpsPerCTA = [4, 1], order = [1, 0]}>",
    ],
)
def test_layouts_with_neighbours(layout: str) -> None:
    check_pairs(Compiled(layout))


@pytest.mark.parametrize(
    "layout",
    [
        "#ttg.linear<{register = [[8, 0], [0, 1]], lane = [[1, 0]], warp = [[16, 0]], block = []}>",
        "#ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [4, 1], order = [1, 0]}>",
        "#ttg.blocked<{sizePerThread = [2, 2], threadsPerWarp = [32, 1], warpsPerCTA = [4, 1], order = [0, 1]}>",
        "#ttg.later<{}>",
    ],
)
def test_other_layouts_are_refused(layout: str) -> None:
    with pytest.raises(BackendError, match=r"registers in an order .*, #ttg.*; install triton"):
        check_pairs(Compiled(layout))
    check_pairs(Compiled(layout, INSTRUCTION.replace("v2.f32", "b32")))
