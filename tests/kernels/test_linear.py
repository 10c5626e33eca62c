"""Native linears equal the reference; a row gives the same bits alone, in any batch and with any number of threads."""

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch

from kernels.linear import reference
from kernels.linear.op import linear
from kernels.linear.packing import PackedLinear, pack_linear, packed_shape, unpack_linear
from kernels.native.compiler import KERNELS, build, compile_library, runnable_sets
from kernels.native.library import Library, open_library
from kernels.native.team import Team
from tests.kernels.conftest import PROBES
from tests.support.tolerances import close

SHAPES = [(960, 576), (576, 1536), (1, 1), (16, 33), (17, 64), (70, 2), (50, 7), (128, 255)]
"""(num_out, num_in)"""
DTYPES = [torch.float32, torch.bfloat16]


class EmulatedTiles:
    """The library of AMX with its tiles in software, as far as linears need it."""

    name = "emulated-tiles"


@pytest.fixture(scope="module", params=(*runnable_sets(), EmulatedTiles), ids=lambda isa: isa.name if isa else "none")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The native library of each instruction set that runs here, and of one that does not."""
    if request.param is not EmulatedTiles:
        build(request.param)
        opened = open_library(request.param)
        assert opened is not None
        return opened
    base = next((isa for isa in runnable_sets() if isa.name.startswith("avx512")), None)
    if base is None:
        pytest.skip("emulated with AVX-512")
    target = tmp_path_factory.mktemp("tiles") / "tiles.so"
    sources = [*KERNELS.glob("native/*.cpp"), *KERNELS.glob("linear/*.cpp"), PROBES / "tiles.cpp"]
    compile_library(base, sources, target, ("-I", str(KERNELS), "-DTANDEM_EMULATED_TILES"))
    functions = ctypes.CDLL(str(target))
    assert functions.probe_has_tiles() == 1
    return Library(EmulatedTiles.name, functions)


@pytest.fixture(scope="module", params=[1, 3])
def team(library: Library, request: pytest.FixtureRequest) -> Iterator[Team]:
    team = Team(library, request.param)
    yield team
    team.close()


def _parameters(num_out: int, num_in: int, dtype: torch.dtype, is_gated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_out * 1000 + num_in)
    rows = num_out * (2 if is_gated else 1)
    weight = torch.randn(rows, num_in, generator=generator) * num_in**-0.5
    return weight.to(dtype), torch.randn(rows, generator=generator).to(dtype)


def _rows(num_rows: int, num_in: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(num_rows)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_equals_reference(num_out: int, num_in: int, is_gated: bool, dtype: torch.dtype, team: Team) -> None:
    weight, bias = _parameters(num_out, num_in, dtype, is_gated)
    for with_bias in (bias, None):
        packed = pack_linear(weight, with_bias, is_gated=is_gated)
        for num_rows in (0, 1, 7, 8, 13, 16, 45):
            x = _rows(num_rows, num_in, dtype)
            expected = reference.linear(x, weight, with_bias, is_gated=is_gated)
            exact = linear(x, packed, team, is_output_float=True)
            close(exact, expected.float())
            close(linear(x, packed, team), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_row_does_not_depend_on_others_nor_on_threads(is_gated: bool, dtype: torch.dtype, library: Library) -> None:
    weight, bias = _parameters(200, 301, dtype, is_gated)
    packed = pack_linear(weight, bias, is_gated=is_gated)
    x = _rows(700, 301, dtype)  # more than a chunk of rows
    one, two = Team(library, 1), Team(library, 2)
    whole = linear(x, packed, two)
    assert torch.equal(whole, linear(x, packed, one))
    for first, last in ((0, 1), (5, 7), (3, 6), (690, 694), (100, 105), (8, 14), (1, 8), (9, 17), (0, 31), (300, 700)):
        assert torch.equal(linear(x[first:last], packed, one), whole[first:last])


def test_what_lies_beside_the_rows_is_neither_read_nor_written(team: Team) -> None:
    weight, bias = _parameters(21, 7, torch.bfloat16, False)
    around = torch.full((5 * 7 + 2,), torch.nan, dtype=torch.bfloat16)
    x = around[1:-1].view(5, 7)
    x.copy_(_rows(5, 7, torch.bfloat16))
    close(
        linear(x, pack_linear(weight, bias), team, is_output_float=True),
        reference.linear(x, weight, bias, is_gated=False).float(),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_packing_loses_nothing_and_pads_with_zeros(
    num_out: int, num_in: int, is_gated: bool, dtype: torch.dtype
) -> None:
    weight, bias = _parameters(num_out, num_in, dtype, is_gated)
    out = torch.full(packed_shape(num_out, num_in, dtype, is_gated=is_gated), torch.nan, dtype=dtype)
    packed = pack_linear(weight, bias, is_gated=is_gated, out=out)
    assert packed.packed.data_ptr() == out.data_ptr()
    assert torch.equal(unpack_linear(packed), weight)
    assert packed.bias is not None
    assert int(packed.packed.count_nonzero()) == int(weight.count_nonzero())
    assert packed.bias.sum().item() == pytest.approx(bias.float().sum().item(), rel=1e-5, abs=1e-5)


def test_the_order_of_a_panel() -> None:
    weight = torch.arange(18 * 4, dtype=torch.bfloat16).view(18, 4)
    packed = pack_linear(weight).packed
    assert packed[0, 0, :2].tolist() == [[0, 1], [4, 5]]  # numbers 0 and 1 of outputs 0 and 1
    assert packed[0, 1, 15].tolist() == [62, 63]
    assert packed[1, 0, 1].tolist() == [68, 69]
    gated = pack_linear(weight, is_gated=True).packed
    assert gated[:2, 0, 0].tolist() == [[0, 1], [36, 37]]  # gate 0 and what it gates


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.float(),
        lambda x: x[:, :-1],
        lambda x: x.t().contiguous().t(),
        lambda x: x[0],
    ],
)
def test_what_does_not_fit_is_refused(spoil: Callable[[torch.Tensor], torch.Tensor], team: Team) -> None:
    packed: PackedLinear = pack_linear(torch.zeros(16, 8, dtype=torch.bfloat16))
    with pytest.raises(AssertionError):
        linear(spoil(torch.zeros(4, 8, dtype=torch.bfloat16)), packed, team)
