"""The tensor-core forward on a CPU against the reference in fp64."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch
from attention_cases import STRUCTS, Case, Forward, Rows, check
from harness import ORDERS, Library, build
from torch import Tensor

from gistkit.layouts.tiles import tiles

SOURCES = [f"csrc/cuda/attention_forward{part}.cu" for part in ("", "_bf16", "_fp16")]
TILE_QUERIES, TILE_KEYS = 128, 64
BF16, FP16 = torch.bfloat16, torch.float16


class Lists(ctypes.Structure):
    _fields_ = [
        ("counts", ctypes.c_void_p),
        ("entries", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("capacity", ctypes.c_int32),
    ]


class Device(ctypes.Structure):
    _fields_ = [
        ("key_tiles", Lists),
        ("query_tiles", Lists),
        ("splits", ctypes.c_int),
        ("workspace", ctypes.c_void_p),
    ]


DEVICE = [
    ("common/attention.h", "gistkit::DeviceTiles", Lists),
    ("common/attention.h", "gistkit::AttentionDevice", Device),
]


def library(checked: bool = False) -> Library:
    return build("attention_forward", SOURCES, checked=checked, structs=[*STRUCTS, *DEVICE])


@dataclass
class KeyTiles:
    counts: Tensor
    entries: Tensor
    order: Tensor

    @classmethod
    def of(cls, case: Case) -> KeyTiles:
        lists = tiles(case.plan, TILE_QUERIES, TILE_KEYS)
        offsets, flat = torch.from_numpy(lists.key_offsets), torch.from_numpy(lists.key_entries).int()
        counts = offsets.diff().int()
        entries = torch.full((len(counts), max(1, -(-case.keys // TILE_KEYS))), -1, dtype=torch.int32)
        for i, count in enumerate(counts.tolist()):
            entries[i, :count] = flat[offsets[i] : offsets[i] + count]
        return cls(counts, entries, counts.argsort(descending=True, stable=True).int())

    def params(self) -> Lists:
        return Lists(*(t.data_ptr() for t in (self.counts, self.entries, self.order)), self.entries.shape[1])


def forward(case: Case, *, splits: int = 1, checked: bool = False, **options: str) -> list[Tensor]:
    """[out, lse]"""
    params, device, lists = Forward(), Device(), KeyTiles.of(case)
    case.fill(params)
    out = case.empty(case.heads, case.queries, case.value_dim)
    lse = torch.full((case.batch, case.heads, case.queries), torch.nan)
    params.out, params.lse = Rows.of(out), lse.data_ptr()
    kernels = library(checked)
    size = kernels.function("gistkit::cuda::attention_forward_workspace")
    size.restype = ctypes.c_size_t
    workspace = torch.full((size(ctypes.c_void_p(ctypes.addressof(params)), splits) // 4,), torch.nan)
    device.key_tiles, device.splits, device.workspace = lists.params(), splits, workspace.data_ptr()
    kernels.run(
        "gistkit::cuda::attention_forward",
        params,
        device,
        inputs={**case.inputs("query", "key", "value", "key_bias"), **vars(lists)},
        outputs={"out": out, "lse": lse, "workspace": workspace},
        **options,
    )
    return [out, lse]


def check_forward(case: Case, **options: object) -> None:
    check(case, forward(case, **options), ("out", "lse"))


@pytest.mark.parametrize("kind", ["full", "causal", "gistpool", "dodo", "random"])
@pytest.mark.parametrize("length", [1, 63, 65, 200, 203])
def test_parity(length: int, kind: str) -> None:
    for dtype in (BF16, FP16):
        check_forward(Case(length, kind=kind, batch=1, dim=64, dtype=dtype))


DIMS = [
    (1, 1),
    (17, 40),
    (64, 64),
    (80, 96),
    (96, 33),
    (128, 128),
    (70, 128),
    (192, 128),
    (160, 100),
    (256, 256),
    (200, 256),
    (64, 200),
]


@pytest.mark.parametrize("dim,value_dim", DIMS)
def test_head_dims(dim: int, value_dim: int) -> None:
    for dtype in (BF16, FP16):
        check_forward(Case(141, 150, batch=1, heads=1, dim=dim, value_dim=value_dim, dtype=dtype))
