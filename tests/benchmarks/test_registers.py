"""The parsing and the comparison of benchmarks/registers.py, on a report and instructions written by hand."""

import csv
import re
import runpy
import sys
from pathlib import Path

import pytest
import registers

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

SAID = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7gistkit4cuda4turnIfLi4EEEvNS_6ParamsE' for 'sm_90a'
ptxas info    : Function properties for _ZN7gistkit4cuda4turnIfLi4EEEvNS_6ParamsE
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 62 registers, used 1 barriers, 256 bytes smem
ptxas info    : Compiling entry function '_ZN7gistkit4cuda4stayEv' for 'sm_90a'
ptxas info    : Function properties for _ZN7gistkit4cuda4stayEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers
"""
SASS = """\
\t.section\t.text._ZN7gistkit4cuda4stayEv,"ax",@progbits
.text._ZN7gistkit4cuda4stayEv:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   EXIT ;
.text._ZN7gistkit4cuda4turnIfLi4EEEvNS_6ParamsE:
        /*0000*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0010*/              @!P1 LDG.E R8, desc[UR4][R2.64+0x10] ;
        /*0020*/                   LDG.E.U16 R9, desc[UR4][R2.64+0x20] ;
        /*0030*/                   LDG.E.LTC128B.64 R10, desc[UR4][R2.64+0x30] ;
        /*0040*/                   STL.64 [R1], R10 ;
        /*0050*/                   STS.64 [R12], R4 ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/                   LDS.U.128 R16, [R12] ;
        /*0080*/                   LDS R20, [R13+0x80] ;
        /*0090*/                   LDS R21, [R13] ;
        /*00a0*/                   LDSM.16.M88.4 R24, [R13] ;
        /*00b0*/               @P0 STG.E.128 desc[UR4][R2.64], R16 ;
        /*00c0*/                   STG.E.U8 desc[UR4][R2.64+0x10], R20 ;
        /*00d0*/                   ST.E.128 desc[UR4][R2.64], R16 ;
        /*00e0*/                   EXIT ;
"""
TURN = {
    "source": "turns",
    "kernel": "turn<float, 4>",
    "architecture": "sm_90a",
    "registers": "62",
    "stack": "16",
    "spill_stores": "8",
    "spill_loads": "12",
    "loads": "16x1 32x1 64x1 128x1",
    "stores": "8x1 128x1",
    "shared_loads": "32x2 128x1",
    "shared_stores": "64x1",
    "generic": "1",
    "in_flight": "30",
    "wgmma": "0",
}


def test_rows_hold_what_ptxas_and_the_disassembler_say() -> None:
    turn, stay = registers.rows_of("turns", "90a", SAID, SASS)
    assert turn == TURN and list(turn) == list(registers.FIELDS)
    assert stay == {
        **{key: "0" for key in registers.FIELDS},
        **{kind: "" for kind in registers.ACCESSES},
        "source": "turns",
        "kernel": "stay",
        "architecture": "sm_90a",
        "registers": "8",
    }


def function(code: str) -> str:
    """A disassembled function f of these instructions, labels among them."""
    lines = [x if x.startswith(".") else f"        /*0000*/    {x} ;" for x in code.split("; ")]
    return "\n".join([".text.f:", *lines])


@pytest.mark.parametrize(
    ("code", "most"),
    [
        ("LDG.E.128 R4, [R2.64]; LDG.E.128 R8, [R2.64]; FADD R1, R4, R8; LDG.E.64 R4, [R2.64]", 32),
        ("LDG.E.128 R4, [R2.64]; FADD R1, R1, R7; LDG.E.128 R8, [R2.64]; FADD R1, R1, R8", 16),
        ("LDG.E.128 R4, [R2.64]; FADD R8, R1, R3; LDG.E.64 R10, [R8.64]", 24),  # an address that was not loaded
        ("LDG.E.64 R4, [R2.64]; LDG.E.128 R8, [R4.64]", 16),  # one that was
        ("LDG.E R4, [R2.64]; STG.E [R2.64], R4; LDG.E R4, [R2.64]", 4),
        ("@P1 LDG.E R4, [R2.64]; @P0 BRA `(.L_x_1); LDG.E.U16 R5, [R2.64]", 6),
        ("LDG.E R4, [R2.64]; BRA `(.L_x_1); LDG.E.U16 R5, [R2.64]", 4),
        ("LDG.E R4, [R2.64]; .L_x_1:; LDG.E.U16 R5, [R2.64]", 4),
        ("LDS.128 R4, [R2]; MOV R1, R2; EXIT", 0),
    ],
)
def test_bytes_in_flight(code: str, most: int) -> None:
    functions = registers.functions_of(function(code))
    assert list(functions) == ["f"] and len(functions["f"]) == len(code.split("; "))
    assert registers.most_in_flight(functions["f"]) == most


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"registers": "70", "stack": "0"},  # another compiler's
        {"loads": "16x2 32x2 64x2 128x2"},  # unrolled twice as often
        {"stores": "128x1"},
        {"stores": "8x1 128x4"},
        {"shared_loads": "32x4 128x1"},
        {"generic": "0"},
        {"in_flight": "16"},
    ],
)
def test_as_good_as_the_table(change: dict[str, str]) -> None:
    assert registers.losses([{**TURN, **change}], [TURN]) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stores": "8x1 32x4"}, "stores 8x1 32x4, was 8x1 128x1"),
        ({"stores": "8x5 128x0"}, "stores"),
        ({"loads": "16x1 32x1 64x3"}, "loads 16x1 32x1 64x3, was 16x1 32x1 64x1 128x1"),
        ({"shared_loads": "32x6"}, "shared_loads"),
        ({"shared_stores": "32x2"}, "shared_stores 32x2, was 64x1"),
        ({"spill_stores": "16"}, "spill_stores 16, was 8"),
        ({"spill_loads": "0"}, "spill_loads 0, was 12"),
        ({"generic": "2"}, "generic 2, was 1"),
        ({"in_flight": "15"}, "in_flight 15, was 30"),
        ({"wgmma": "0"}, "wgmma 0, was 8"),
    ],
)
def test_worse_than_the_table(change: dict[str, str], said: str) -> None:
    (line,) = registers.losses([{**TURN, "wgmma": "4", **change}], [{**TURN, "wgmma": "8"}])
    assert line.startswith("turns turn<float, 4> sm_90a: ") and said in line


def test_kernels_of_wgmma_without_faults() -> None:
    """Spills of the warps that do not multiply lie before the products or behind them."""
    code = "STL [R1], R2; USETMAXREG.TRY_ALLOC.CTAPOOL P0, 0xf0; HGMMA.64x64x16.F32 R4, gdesc[UR4], R4; "
    code += "HGMMA.64x64x16.F32 R4, gdesc[UR8], R4, gsb0; USETMAXREG.DEALLOC.CTAPOOL 0x18; LDL R2, [R1]"
    said = "ptxas info    : (C7510) Potential Performance Loss: wgmma"
    assert registers.faults_of("attention/hopper_forward_bf16", "90a", said, function(code)) == []
    assert registers.faults_of("turns", "90a", SAID, SASS) == []
    assert registers.faults_of("attention/hopper_forward_bf16", "80", SAID, function("EXIT")) == []


@pytest.mark.parametrize(
    ("said", "code", "fault"),
    [
        ("ptxas info    : (C7512) Potential Performance Loss: 'k'", "HGMMA R4, R4", "(C7512) Potential"),
        ("ptxas info    : (C7514) Potential Performance Loss: 'k'", "HGMMA R4, R4", "(C7514)"),
        ("ptxas info    : (C7519) warpgroup.arrive is injected", "HGMMA R4, R4", "(C7519) warpgroup"),
        ("ptxas info    : (C7520) wgmma serialized", "HGMMA R4, R4", "(C7520)"),
        ("", "HGMMA R4, R4; LDL.64 R6, [R1]; HGMMA R4, R4", "f spills among its wgmma"),
        ("", "HGMMA R4, R4; STL [R1], R6; HGMMA R4, R4", "f spills among its wgmma"),
        ("", "HGMMA R4, R4; EXIT; .text.g:; USETMAXREG.DEALLOC.CTAPOOL 0x18; EXIT", "g has no wgmma"),
        ("", "UTMALDG.4D [UR8], [UR4]; EXIT", "no kernel has wgmma"),
    ],
)
def test_faults_of_wgmma(said: str, code: str, fault: str) -> None:
    (line,) = registers.faults_of("attention/hopper_forward_bf16", "90a", said, function(code))
    assert line.startswith("attention/hopper_forward_bf16 sm_90a: ") and fault in line


def test_a_kernel_that_is_new_or_gone() -> None:
    other = {**TURN, "architecture": "sm_80"}
    assert registers.losses([TURN, other], [TURN]) == ["turns turn<float, 4> sm_80: not in the table"]
    assert registers.losses([TURN], [TURN, other]) == ["turns turn<float, 4> sm_80: in the table only"]


def test_the_disassembler_among_pythons_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(RuntimeError, match="pip install nvidia-cuda-nvdisasm"):
        registers.disassembler()
    tool = tmp_path / "nvidia" / "cu13" / "bin" / "nvdisasm"
    tool.parent.mkdir(parents=True)
    tool.touch()
    assert registers.disassembler() == str(tool)


def test_a_source_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["registers.py", "--only", "rope/rotation", "ropes"])
    with pytest.raises(SystemExit, match=r"--only: expected some of .*rope/rotation.*; got ropes"):
        runpy.run_path(str(BENCHMARKS / "registers.py"), run_name="__main__")


def test_the_committed_table_is_one_of_this_form() -> None:
    with registers.TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(registers.FIELDS)
    kernels = [tuple(row[key] for key in registers.KEYS) for row in rows]
    assert kernels == sorted(set(kernels))
    assert {source for source, *_ in kernels} <= {registers.name_of(path) for path in registers.SOURCES}
    assert registers.losses(rows, rows) == []


def test_what_was_lost_once() -> None:
    """By the committed table, which `make cuda` compares with a fresh one."""
    with registers.TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    wide = {"double, 2", "float, 4", "BFloat16, 8", "Float16, 8"}
    checked = 0
    for row in rows:
        name, _, arguments = row["kernel"].partition("<")
        if not any(arguments.startswith(form) for form in wide):
            continue
        if name in ("rope_kernel", "pool_kernel"):
            assert set(re.findall(r"(\d+)x", row["shared_loads"])) == {"128"}, row
        if name in ("rope_kernel", "pool_kernel", "bias_gelu_kernel", "trie_mix_kernel"):
            assert set(re.findall(r"(\d+)x", row["stores"])) == {"128"}, row
        if name in ("ancestor_key_grad_kernel", "bias_gelu_grad_kernel"):
            assert "128x" in row["stores"], row
        if name == "pool_kernel":
            assert int(row["in_flight"]) >= 128, row
        checked += name in ("rope_kernel", "pool_kernel", "bias_gelu_kernel", "trie_mix_kernel")
    assert checked == 40
