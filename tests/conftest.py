"""Shared by all tests: without a GPU, Triton kernels run in its interpreter (decided before they are imported).

What tests cache and where they look for data is not the user's. Every process has one thread: several workers would
wait for one another, and some tests compare bits.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """What has been imported stays: garbage is looked for among what tests make alone."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Cache and data root of the tests; subprocesses inherit them."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RETREEVER_CACHE", str(folder / "cache"))
        patch.setenv("RETREEVER_DATA", str(folder / "data"))
        yield folder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests take many small steps, which torch's threads only slow down; those of threads ask for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
