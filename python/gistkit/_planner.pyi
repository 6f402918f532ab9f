import numpy as np
from numpy.typing import NDArray

def compile(
    roles: NDArray[np.uint8],
    segments: NDArray[np.int32],
    documents: NDArray[np.int32],
    ordinals: NDArray[np.int64],
    relations: NDArray[np.int64],
    grouped: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]: ...
def lists(spans: NDArray[np.int32], num_keys: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...
def trie(
    positions: NDArray[np.int64], base: int, digits: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]: ...
def group(table: NDArray[np.int32], values: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...
