"""One build of the C versions for the folder's tests, on one thread."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from millstream.kernels.backend import configure


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of this session's C builds."""
    return tmp_path_factory.mktemp("kernel-cache")


@pytest.fixture(autouse=True)
def native_backend(kernel_cache: Path) -> Iterator[None]:
    """Every test starts with the default choice."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    configure("auto", kernel_cache)
    yield
    configure("auto")
    torch.set_num_threads(num_threads)
