"""Machine code read: which instructions of loops over KV access the stack."""

import pytest

from treegen.codegen.kernel_usage import accesses_in_loops, usage
from treegen.ir.errors import BackendError

OUTER = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;     /* 0x00000a00ff017b82 */
        /*0010*/                   STL [R1], R4 ;             /* 0x0000000401007387 */
        /*0020*/                   LDG.E R5, desc[UR4][R2.64] ;
{}
        /*0100*/                   LDL R4, [R1] ;
        /*0110*/              @!P1 BRA 0x20 ;
        /*0120*/                   EXIT ;
        /*0130*/                   BRA 0x130;
"""


@pytest.mark.parametrize(
    ("loop", "accesses"),
    [
        ("/*0030*/ HMMA.16816.F32.BF16 R4, R8, R12, R4 ;\n /*0040*/ @P0 BRA 0x30 ;", 0),
        (
            "/*0030*/ LDL.LU R7, [R1+0x4] ;\n /*0040*/ HGMMA.64x64x16.F32 R24, gdesc[UR8] ;\n /*0050*/ @!P0 BRA 0x30 ;",
            1,
        ),
        ("/*0030*/ @P2 STL.64 [R1], R6 ;\n /*0040*/ UTCHMMA gdesc[UR4], tmem[UR6] ;\n /*0050*/ BRA.U UP0, 0x30 ;", 1),
        ("/*0030*/ LDL R7, [R1] ;\n /*0040*/ FADD R7, R7, R8 ;\n /*0050*/ @P0 BRA 0x30 ;", 0),  # no products
        ("/*0030*/ HMMA.16816.F32 R4, R8, R12, R4 ;", 1),  # the outer loop is the innermost one
    ],
)
def test_accesses_in_innermost_loops_with_products_count(loop: str, accesses: int) -> None:
    inner = "\n".join(f"        {line.strip()}" for line in loop.splitlines())
    assert accesses_in_loops(OUTER.format(inner)) == accesses


def test_what_is_no_machine_code_is_told() -> None:
    with pytest.raises(BackendError, match="is what cuobjdump says of it"):
        usage(b"no machine code")
