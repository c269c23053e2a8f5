"""Experts and their router against plain torch in fp64, whatever the balance."""

from typing import Any

import pytest
import torch

from kvbaton.engine.quantized_tensors import dequantize_mxfp4
from kvbaton.kernels import fused_moe as module
from kvbaton.kernels.fused_moe import (
    ClampedSwiGLU,
    Tile,
    fused_moe,
    fused_moe_reference,
    tile_of,
    token_counts,
)
from kvbaton.kernels.fused_router import fused_router
from kvbaton.kernels.fused_topk import ExpertChoice, fused_topk, fused_topk_reference
from kvbaton.kernels.mxfp4 import WORDS, pack_mxfp4, quantize_mxfp4, unpack_mxfp4
from kvbaton.kernels.quantize_fp8 import quantize_fp8_reference


def make_experts(
    place: Any, experts: int, size: int, middle: int
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = place.randn(experts, 2 * middle, size) * size**-0.5
    return gate_up, place.randn(experts, size, middle) * middle**-0.5


def make_routes(place: Any, tokens: int, experts: int, top_k: int, skew: float) -> Any:
    """Weights and ids; with `skew` most tokens choose the same experts, and some nobody."""
    scores = torch.randn(tokens, experts) + skew * torch.randn(experts)
    weights, ids = scores.softmax(-1).topk(top_k)
    return weights.to(place.device, place.dtype), ids.int().to(place.device)


def wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.cpu().double() if x.is_floating_point() else x.cpu() for x in tensors]


@pytest.mark.parametrize("seed", range(8))
def test_any_shape_and_balance(place: Any, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def one_of(first: int, last: int) -> int:
        return int(torch.randint(first, last + 1, (), generator=draw))

    tokens, experts = one_of(1, 70), one_of(4, 16)
    top_k = one_of(1, min(8, experts))
    size, middle = 8 * one_of(1, 20), 8 * one_of(1, 10)
    x, (gate_up, down) = place.randn(tokens, size), make_experts(place, experts, size, middle)
    routes = make_routes(place, tokens, experts, top_k, skew=float(seed % 4))
    expected = fused_moe_reference(*wide(x, gate_up, down, *routes))
    place.close(fused_moe(x, gate_up, down, *routes), expected)


def test_experts_without_tokens_and_one_with_all(place: Any) -> None:
    x, (gate_up, down) = place.randn(40, 32), make_experts(place, 6, 32, 16)
    gate_up[[0, 2, 5]] = torch.nan  # nobody goes there
    weights = place.randn(40, 2)
    ids = torch.tensor([[4, 1]] * 39 + [[3, 4]], dtype=torch.int32, device=place.device)
    expected = fused_moe_reference(*wide(x, gate_up, down, weights, ids))
    place.close(fused_moe(x, gate_up, down, weights, ids), expected)


@pytest.mark.parametrize("tokens", [1, 2])
def test_few_tokens_over_ranks_with_whole_experts(place: Any, tokens: int) -> None:
    x, (gate_up, down) = place.randn(tokens, 40), make_experts(place, 8, 40, 24)
    weights, ids = make_routes(place, tokens, 8, 3, skew=0.0)
    expected = fused_moe_reference(*wide(x, gate_up, down, weights, ids))
    parts = [
        fused_moe(
            x, gate_up[first : first + 2], down[first : first + 2], weights, ids,
            first_expert=first, num_experts=8,
        )
        for first in range(0, 8, 2)
    ]  # fmt: skip
    place.close(sum(part.double() for part in parts), expected)


@pytest.mark.parametrize("clamped", [False, True])
def test_biases_and_a_clamped_activation(place: Any, clamped: bool) -> None:
    x, (gate_up, down) = place.randn(30, 40) * 3, make_experts(place, 5, 40, 24)
    weights, ids = make_routes(place, 30, 5, 2, skew=1.0)
    biases: dict[str, Any] = {"gate_up_bias": place.randn(5, 48), "down_bias": place.randn(5, 40)}
    swiglu = ClampedSwiGLU(alpha=1.702, limit=2.5) if clamped else None
    wide_biases: dict[str, Any] = dict(zip(biases, wide(*biases.values()), strict=True))
    expected = fused_moe_reference(
        *wide(x, gate_up, down, weights, ids), **wide_biases, swiglu=swiglu
    )
    place.close(fused_moe(x, gate_up, down, weights, ids, **biases, swiglu=swiglu), expected)


@pytest.mark.parametrize("size", [2, 4])
def test_ranges_of_experts_add_up(place: Any, size: int) -> None:
    x, (gate_up, down) = place.randn(33, 48), make_experts(place, 8, 48, 24)
    weights, ids = make_routes(place, 33, 8, 3, skew=2.0)
    total = torch.zeros(33, 48, dtype=torch.float64)
    for first in range(0, 8, 8 // size):
        held = slice(first, first + 8 // size)
        share: dict[str, Any] = {"first_expert": first, "num_experts": 8}
        total += fused_moe(x, gate_up[held], down[held], weights, ids, **share).double().cpu()
    place.close(total, fused_moe_reference(*wide(x, gate_up, down, weights, ids)))


def narrowed(weight: torch.Tensor, run: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts in FP8, and their scales, of runs of inputs."""
    experts, rows, depth = weight.shape
    numbers, scales = quantize_fp8_reference(weight.flatten(0, 1), run)
    scales = scales.view(experts, rows, depth // run).transpose(1, 2).contiguous()
    return numbers.view(weight.shape), scales


@pytest.mark.parametrize("tokens", [1, 2, 20, 300])
@pytest.mark.parametrize(("runs", "size", "middle"), [(1, 160, 48), (3, 192, 96), (2, 256, 256)])
def test_weights_in_fp8(
    place: Any, tokens: int, runs: int, size: int, middle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted = place.device.type == "cpu"
    if interpreted:  # products of fewer rows, which the interpreter can do
        monkeypatch.setattr(
            module, "FP8_TILES", dict(zip((4, 8, 99), module.FP8_TILES.values(), strict=True))
        )
        tokens = {20: 9, 300: 17}.get(tokens, tokens)
    if place.dtype == torch.float32 and not interpreted:
        pytest.skip("models of FP8 have activations of 16 bits")
    gate_up, down = make_experts(place, 4, size, middle)
    gate_up, of_gate_up = narrowed(gate_up, size // runs)
    down, of_down = narrowed(down, middle // runs)
    x, routes = place.randn(tokens, size), make_routes(place, tokens, 4, 2, skew=1.0)
    scales: dict[str, Any] = {"gate_up_scales": of_gate_up, "down_scales": of_down}
    found = fused_moe(x, gate_up, down, *routes, **scales)
    wide_scales: dict[str, Any] = dict(zip(scales, wide(*scales.values()), strict=True))
    expected = fused_moe_reference(*wide(x, gate_up, down, *routes), **wide_scales)
    if not tile_of(tokens, 2, 4, gate_up.dtype).quantised:
        place.close(found, expected)
    error = (found.cpu().double() - expected).norm() / expected.norm()
    assert error < 0.06, f"relative error {error:.3f}"  # e4m3 has 3 bits, inputs and between


def test_ranks_that_share_experts_in_fp8(place: Any) -> None:
    """Ranges of experts, and of the inputs between, whose blocks have a scale in each part."""
    if place.dtype == torch.float32 and place.device.type == "cuda":
        pytest.skip("models of FP8 have activations of 16 bits")
    gate_up, of_gate_up = narrowed(place.randn(4, 2 * 96, 128) / 11, 128)
    down, of_down = narrowed(place.randn(4, 128, 96) / 10, 32)
    x, routes = place.randn(9, 128), make_routes(place, 9, 4, 2, skew=1.0)
    scales: dict[str, Any] = {"gate_up_scales": of_gate_up, "down_scales": of_down}
    wide_scales: dict[str, Any] = dict(zip(scales, wide(*scales.values()), strict=True))
    expected = fused_moe_reference(*wide(x, gate_up, down, *routes), **wide_scales)
    of_experts = [
        fused_moe(
            x, gate_up[held], down[held], *routes, first_expert=held.start, num_experts=4,
            gate_up_scales=of_gate_up[held], down_scales=of_down[held],
        )
        for held in (slice(0, 1), slice(1, 4))
    ]  # fmt: skip
    place.close(sum(part.double() for part in of_experts), expected)
    of_columns = []
    for columns in (slice(0, 32), slice(32, 96)):
        rows = torch.arange(columns.start, columns.stop, device=x.device)
        rows = torch.cat((rows, rows + 96))
        of_columns.append(
            fused_moe(
                x, gate_up[:, rows].contiguous(), down[..., columns].contiguous(), *routes,
                gate_up_scales=of_gate_up[..., rows].contiguous(),
                down_scales=of_down[:, columns.start // 32 : columns.stop // 32].contiguous(),
            )
        )  # fmt: skip
    place.close(sum(part.double() for part in of_columns), expected)


@pytest.mark.parametrize(
    ("tokens", "size", "middle", "clamped"),
    [
        (1, 160, 96, True),
        (2, 128, 32, False),
        (17, 160, 96, True),
        (64, 64, 32, True),
        pytest.param(100, 288, 224, True, marks=pytest.mark.gpu),
        pytest.param(900, 1440, 736, True, marks=pytest.mark.gpu),
    ],
)
def test_weights_in_mxfp4(
    place: Any, tokens: int, size: int, middle: int, clamped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All numbers, scales at their ends, parts of blocks, and gpt-oss's activation and biases."""
    if place.dtype == torch.float16 or (place.dtype == torch.float32 and tokens > 64):
        pytest.skip("activations beside MXFP4 are bfloat16; tiles have no room for float32")
    if place.device.type == "cpu":  # products of fewer rows, which the interpreter can do
        tile = Tile(16, 64, 64, 4, 2, swapped=tokens == 17)
        monkeypatch.setattr(module, "MXFP4_TILES", {1 << 31: tile})
    packed, floats = [], []
    for rows, columns in ((2 * middle, size), (size, middle)):
        groups = (3, rows, columns // 32)
        blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, groups, dtype=torch.uint8)
        scales[0, 0, 0], scales[0, 1, 0] = 2, 128
        packed.append([x.to(place.device) for x in pack_mxfp4(blocks, scales)])
        floats.append(dequantize_mxfp4(blocks, scales).double())
    (gate_up, of_gate_up), (down, of_down) = packed
    x, routes = place.randn(tokens, size), make_routes(place, tokens, 3, 2, skew=1.0)
    biases: dict[str, Any] = {"gate_up_bias": place.randn(3, 2 * middle)}
    biases["down_bias"] = place.randn(3, size)
    wide_biases: dict[str, Any] = dict(zip(biases, wide(*biases.values()), strict=True))
    swiglu = ClampedSwiGLU(alpha=1.702, limit=7.0) if clamped else None
    found = fused_moe(
        x, gate_up, down, *routes, gate_up_scales=of_gate_up, down_scales=of_down, swiglu=swiglu,
        **biases,
    )  # fmt: skip
    given, *chosen = wide(x, *routes)
    expected = fused_moe_reference(given, *floats, *chosen, swiglu=swiglu, **wide_biases)
    place.close(found, expected)


def test_mxfp4_unpacks_as_it_was_packed() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).expand(2, 3, 256).reshape(2, 3, 16, 16)
    scales = torch.arange(96, dtype=torch.uint8).view(2, 3, 16)
    for groups in (16, 15, 13, 1):
        stored = blocks[:, :, :groups], scales[:, :, :groups]
        words, factors = pack_mxfp4(*stored)
        found = unpack_mxfp4(words, factors)
        assert found.shape == (2, 3, -(-groups // 4) * 128)
        assert torch.equal(found[..., : groups * 32], dequantize_mxfp4(*stored))
        assert not found[..., groups * 32 :].any()


def test_floats_in_mxfp4_are_near() -> None:
    x = torch.randn(7, 160, generator=torch.Generator().manual_seed(1)) * torch.logspace(-9, 9, 160)
    found = dequantize_mxfp4(*quantize_mxfp4(x))
    groups = (found - x).view(7, 5, 32).abs().amax(-1) / x.view(7, 5, 32).abs().amax(-1)
    assert groups.max() <= 0.25  # from 8 to 6
    assert torch.equal(dequantize_mxfp4(*quantize_mxfp4(found)), found)


@pytest.mark.parametrize("tokens", [1, 21, 257])
def test_every_tile(place: Any, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.device.type == "cpu":  # products of fewer rows, which the interpreter can do
        monkeypatch.setattr(module, "TILES", dict(zip((4, 8, 99), module.TILES.values())))  # noqa: B905
        tokens = {21: 9, 257: 17}.get(tokens, tokens)
    x, (gate_up, down) = place.randn(tokens, 160), make_experts(place, 4, 160, 72)
    routes = make_routes(place, tokens, 4, 2, skew=1.0)
    expected = fused_moe_reference(*wide(x, gate_up, down, *routes))
    place.close(fused_moe(x, gate_up, down, *routes), expected)


def test_no_tokens(place: Any) -> None:
    gate_up, down = make_experts(place, 4, 16, 8)
    x, weights = place.randn(0, 16), place.randn(0, 2)
    ids = torch.zeros((0, 2), dtype=torch.int32, device=place.device)
    assert fused_moe(x, gate_up, down, weights, ids).shape == (0, 16)
    choice = ExpertChoice(1, True, place.dtype)
    assert fused_topk(weights, choice)[1].shape == (0, 1)
    assert fused_router(x, gate_up[0], choice._replace(shared=1))[1].shape == (0, 2)


def test_token_counts_reach_every_tile() -> None:
    for top_k, experts in ((2, 8), (8, 128), (8, 256), (3, 7)):
        for dtype, tiles in (
            (torch.bfloat16, module.TILES),
            (torch.float8_e4m3fn, module.FP8_TILES),
            (WORDS, module.MXFP4_TILES),
        ):
            counts = token_counts(top_k, experts)
            taken = dict.fromkeys(tile_of(n, top_k, experts, dtype) for n in counts)
            assert list(taken) == list(tiles.values())


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (8, 2), (60, 4), (128, 8), (16, 16)])
def test_routes_are_those_of_torch(place: Any, experts: int, top_k: int, renormalize: bool) -> None:
    logits = torch.stack([torch.randperm(experts) for _ in range(20)])  # no two are equal
    logits = (logits * 0.25 - 3).to(place.device, place.dtype)
    choice = ExpertChoice(top_k, renormalize, torch.float32)
    weights, ids = fused_topk(logits, choice)
    expected, where = fused_topk_reference(logits.cpu(), choice)
    assert ids.dtype == torch.int32
    assert torch.equal(ids.cpu(), where)
    torch.testing.assert_close(weights.cpu(), expected)
    narrow = fused_topk(logits, choice._replace(dtype=place.dtype))[0]
    assert torch.equal(narrow, weights.to(place.dtype))


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(
    ("experts", "groups", "top_groups", "top_k"), [(256, 8, 4, 8), (12, 3, 2, 4), (16, 1, 1, 6)]
)
def test_routes_of_groups_are_those_of_torch(
    place: Any, experts: int, groups: int, top_groups: int, top_k: int, sigmoid: bool
) -> None:
    logits = torch.stack([torch.randperm(experts) for _ in range(30)]) / 16 - 3  # all different
    logits = logits.to(place.device, place.dtype)
    bias = torch.randn(experts, device=place.device) if sigmoid else None
    choice = ExpertChoice(
        top_k, True, torch.float32, bias, groups, top_groups, scale=2.5, shared=top_k % 3
    )
    weights, ids = fused_topk(logits, choice)
    of_cpu = choice._replace(bias=None if bias is None else bias.cpu())
    expected, where = fused_topk_reference(logits.cpu(), of_cpu)
    assert torch.equal(ids.cpu(), where)
    torch.testing.assert_close(weights.cpu(), expected)


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize(
    ("tokens", "size", "wide_weight"),
    [(1, 200, False), (1, 5000, True), (5, 384, True), (40, 160, False)],
)
def test_a_router_of_few_tokens(
    place: Any, tokens: int, size: int, wide_weight: bool, shared: int
) -> None:
    """Its choice is that of the logits, and its weights are close to theirs."""
    x, weight = place.randn(tokens, size), place.randn(60, size) * size**-0.5
    logit_bias = None if wide_weight else place.randn(60)
    weight = weight.float() if wide_weight else weight
    choice = ExpertChoice(6, True, torch.float32, shared=shared)
    weights, ids = fused_router(x, weight, choice, logit_bias)
    logits = x.cpu().double() @ weight.cpu().double().t()
    logits += 0 if logit_bias is None else logit_bias.cpu().double()
    assert ids.dtype == torch.int32
    assert ids[:, 6:].tolist() == [[60, 61][:shared]] * tokens
    assert weights[:, 6:].eq(1).all()
    near = 1e-5 if weight.dtype == torch.float32 else 0.05
    chosen = logits.gather(1, ids[:, :6].cpu().long())
    assert (chosen >= logits.topk(6).values - near).all()
    torch.testing.assert_close(weights[:, :6].cpu().double(), chosen.softmax(1), atol=near, rtol=0)


def test_no_tokens_choose_none() -> None:
    choice = ExpertChoice(3, True, torch.float32, torch.zeros(8), num_groups=4, top_groups=2)
    weights, ids = fused_topk_reference(torch.empty(0, 8), choice)
    assert weights.shape == ids.shape == (0, 3)


def test_experts_stay_in_range_whatever_the_logits(place: Any) -> None:
    logits = torch.tensor([[torch.nan] * 5, [-torch.inf] * 5, [torch.inf, torch.nan, 0, 1, 2]])
    choice = ExpertChoice(5, True, place.dtype)
    _, ids = fused_topk(logits.to(place.device, place.dtype), choice)
    assert [sorted(row) for row in ids.tolist()] == [list(range(5))] * 3
    bias = torch.zeros(6, device=place.device)
    logits = torch.full((1, 6), torch.nan, device=place.device)
    _, ids = fused_topk(logits, ExpertChoice(4, True, place.dtype, bias, 3, 2))
    assert sorted(ids[0].tolist()) == [0, 1, 2, 3]


@pytest.mark.gpu
def test_a_graph_follows_what_the_router_chooses() -> None:
    """Captured once, replayed with other tokens and another balance; no step waits for the host."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(5)
    x, logits = (torch.randn(24, size, device="cuda").bfloat16() for size in (256, 16))
    gate_up = (torch.randn(16, 256, 256, device="cuda") / 16).bfloat16()
    down = (torch.randn(16, 256, 128, device="cuda") / 16).bfloat16()

    def layer() -> torch.Tensor:
        routes = fused_topk(logits, ExpertChoice(4, True, torch.bfloat16))
        return fused_moe(x, gate_up, down, *routes)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for skew in (0.0, 3.0, 9.0):
        x.normal_()
        logits.normal_().add_(skew * torch.randn(16, device="cuda").bfloat16())
        graph.replay()
        assert torch.equal(out, layer())
