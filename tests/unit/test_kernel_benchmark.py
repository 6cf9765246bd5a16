"""benchmarks.kernels: what it reads in machine code, that it finds planted faults, and that its
measuring code runs without a GPU.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kernel_checks import needs_triton

pytestmark = needs_triton
ROOT = Path(__file__).resolve().parents[2]
bench = pytest.importorskip(
    "benchmarks.kernel_compile", reason="Triton is not installed", exc_type=ImportError
)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from benchmarks import kernels  # noqa: E402
from benchmarks.kernel_bandwidth import Measured  # noqa: E402
from benchmarks.kernel_inputs import Size  # noqa: E402
from benchmarks.kernel_operations import OPERATIONS, model_sizes  # noqa: E402
from megacore.kernels import dropout, gelu, split_heads  # noqa: E402
from tests.pool import PATIENCE  # noqa: E402


@triton.jit
def crowded_kernel(x, y, BLOCK: tl.constexpr):
    """Holds a whole block, sorted by what is only known at its end: many registers, if
    there are few threads.
    """
    lane = tl.arange(0, BLOCK)
    value = tl.load(x + lane).to(tl.float32)
    scaled = value * tl.sum(value, 0)
    tl.store(y + lane, scaled / tl.max(scaled, 0) + value)


@triton.jit
def scattered_kernel(x, y, BLOCK: tl.constexpr):
    """Reads every third element."""
    lane = tl.arange(0, BLOCK)
    tl.store(y + lane, tl.load(x + 3 * lane))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """A stale entry must not answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def planted(kernel: triton.JITFunction, block: int, warps: int, target: str) -> "bench.Compiled":
    """A kernel of this file, compiled as the table's are."""
    pointers = [torch.empty(3 * block, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    launch = bench.Launch(kernel, tuple(pointers), {"BLOCK": block, "num_warps": warps})
    variant = bench.Variant("gelu", Size(1, block), torch.bfloat16, 0, target)
    return bench.inspect(variant, launch, bench.compiled(launch, bench.TARGETS[target]))


def test_a_spill_is_found():
    crowded, roomy = planted(crowded_kernel, 4096, 1, "sm_90"), planted(crowded_kernel, 1024, 4, "sm_90")
    assert crowded.fault.startswith("spills") and crowded.registers == 255
    assert not roomy.fault and roomy.load == 128
    assert replace(roomy, shared=228 * 2**10).fault.startswith("needs 233472 bytes of shared memory")


@pytest.mark.parametrize(
    "target, warps, registers, shared, programs",
    [
        ("sm_90", 8, 32, 0, 8),  # all 64 warps
        ("sm_90", 4, 128, 0, 4),  # all registers
        ("sm_90", 4, 129, 0, 3),  # a warp's registers come in units of 256
        ("sm_90", 1, 200, 0, 8),  # 10 by all registers, but each quarter of them has room for two
        ("sm_90", 1, 32, 0, 32),  # 64 by warps
        ("sm_90", 32, 128, 0, 0),
        ("sm_90", 4, 32, 56 * 2**10, 4),  # 4 times 56 and 1 of each program's own are 228 KiB
        ("sm_90", 4, 32, 56 * 2**10 + 1, 3),
        ("sm_80", 4, 32, 40 * 2**10, 4),  # likewise 164 KiB
        ("sm_80", 4, 32, 40 * 2**10 + 1, 3),
    ],
)
def test_programs_that_fit(target, warps, registers, shared, programs):
    """By NVIDIA's occupancy rules."""
    assert bench.OCCUPANCY[target].fitting_programs(warps, registers, shared) == programs


def test_more_programs_than_fit_are_found():
    roomy = planted(crowded_kernel, 1024, 4, "sm_90")
    assert roomy.resident is None and roomy.fitting is not None and roomy.fitting > 4
    assert not replace(roomy, resident=roomy.fitting).fault
    crowded = replace(roomy, resident=5, registers=128)
    assert crowded.fault == "launches 5 programs a multiprocessor, of which 4 fit"
    impossible = replace(roomy, warps=32, registers=128)
    assert impossible.fault == "launches 1 programs a multiprocessor, of which 0 fit"


def test_spills_are_read_from_amd_assembly():
    assembly = "    .sgpr_spill_count: 0\n    .vgpr_count:     512\n    .vgpr_spill_count: 3\n"
    assert bench.amd_resources(assembly) == (512, 12)


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_narrow_loads_are_found(target):
    assert planted(scattered_kernel, 1024, 4, target).fault == "loads 16 bits at most"


@pytest.mark.parametrize(
    "assembly, load, store",
    [
        ("@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", 128, 0),
        (
            "ld.global.L1::evict_last.L2::cache_hint.v2.b32 {%r1, %r2}, [%rd1], %rd2; ld.global.b16 "
            "{%rs1}, [%rd2];",
            64,
            0,
        ),
        (
            "st.global.v2.b64 [ %rd1 + 0 ], { %rd2, %rd3 }; ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];",
            0,
            128,
        ),
        ("ld.global.nc.f32 %f1, [%rd1]; st.global.u8 [%rd1], %rs1;", 32, 8),
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;", 128, 0),
        ("global_load_dwordx4 v[0:3], v4, s[0:1]\nbuffer_store_short v0, v1, s[0:3], 0 offen", 128, 16),
        (
            "global_load_dword v0, v1, s[0:1]\nglobal_store_b128 v0, v[1:4], s[0:1]\nds_read_b128 v[0:3], v4",
            32,
            128,
        ),
        ("global_load_ushort v0, v1, s[0:1]\nglobal_load_ubyte v0, v1, s[0:1]", 16, 0),
    ],
)
def test_widths_are_read_from_assembly(assembly, load, store):
    assert (bench.widest(assembly, "load"), bench.widest(assembly, "store")) == (load, store)


def test_launches_are_captured_as_triton_would_specialise_them():
    """Aligned pointers and sizes divisible by 16 make the wide loads: a size that
    is not must be seen as such.
    """
    forward, backward, _ = bench.launches_of("bias_gelu", Size(64, 3072), torch.bfloat16)
    assert (forward.kernel.__name__, backward.kernel.__name__) == ("_forward_kernel", "_backward_kernel")
    source, options = forward.source(bench.TARGETS["sm_90"])
    named = {source.fn.arg_names[place[0]]: value for place, value in source.constants.items()}
    assert named["HAS_BIAS"] is True and named["BLOCK"] == 1024 and options["num_warps"] == 4
    assert source.signature["x"] == "*bf16" and source.signature["features"] == "i32"
    divisible = {
        source.fn.arg_names[place[0]]
        for place, hints in source.attrs.items()
        if ["tt.divisibility", 16] in hints
    }
    assert {"x", "bias", "y", "features", "x_stride"} <= divisible
    odd, *_ = bench.launches_of("bias_gelu", Size(64, 3071), torch.bfloat16)
    source, _ = odd.source(bench.TARGETS["sm_90"])
    assert "features" not in {source.fn.arg_names[place[0]] for place, hints in source.attrs.items() if hints}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_captured(name):
    """Forward, and backward where there is one, reach Triton, at the size of some model."""
    assert bench.launches_of(
        name, next(size for found, size in model_sizes() if found == name), torch.bfloat16
    )


def test_a_new_key_compiles_nothing():
    """Every step and every rank draw under another key, from another position: were they
    specialised on, each might compile.
    """
    x = torch.empty(64, 768, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = set()
    for key, first in ((0, 0), (1, 768), (16, 2**40), (2**62 + 1, 64)):
        with bench.recorded_launches() as launches:
            dropout.bias_dropout_residual(
                x, None, x, 0.3, key, first=first, implementation="triton"
            ).backward(torch.empty_like(x))
        found.add(tuple(launch.identity("sm_90") for launch in launches))
    assert len(found) == 1


def test_what_compiles_to_the_same_code_is_compiled_once():
    found = bench.variants(
        [("gelu", Size(64, 3072)), ("gelu", Size(128, 4096)), ("gelu", Size(64, 512))],
        [torch.bfloat16],
        ["sm_90"],
    )
    assert [(v.size.width, v.index) for v in found] == [(3072, 0), (3072, 1), (512, 0), (512, 1)]


def test_tuned_kernels_do_not_spill():
    """The models of most and of widest features, for Hopper; all models and four targets are
    `benchmarks.kernels --compile-only`.
    """
    sizes = model_sizes(("gpt_7b", "gpt_175b"))
    assert {name for name, _ in sizes} == set(OPERATIONS)
    found = list(bench.compile_all(bench.variants(sizes, [torch.bfloat16], ["sm_90"]), 1))
    assert len(found) > 30 and not [kernel for kernel in found if kernel.fault]


def test_programs_that_run_at_once_fit(monkeypatch):
    """All kernels whose grid is sized by the number of multiprocessors, at the sizes of one model; and that a
    launch of too many programs is a fault.
    """
    names = ("layer_norm with residual", "bias_gelu", "split_heads", "bias_dropout_residual")
    sizes = [(name, size) for name, size in model_sizes(("gpt_124m",)) if name in names]
    dtypes, targets = [torch.bfloat16, torch.float32], list(bench.OCCUPANCY)

    def compile_resident() -> list["bench.Compiled"]:
        variants = [variant for variant in bench.variants(sizes, dtypes, targets) if is_resident(variant)]
        return list(bench.compile_all(variants, 1))

    found = compile_resident()
    assert {(kernel.variant.operation, kernel.kernel, kernel.resident) for kernel in found} == {
        ("layer_norm with residual", "_backward_kernel", 4),
        ("bias_gelu", "_backward_kernel", gelu.BACKWARD_PROGRAMS),
        ("split_heads", "_join_kernel", split_heads.BACKWARD_PROGRAMS),
        ("bias_dropout_residual", "_backward_kernel", dropout.BACKWARD_PROGRAMS),
    }
    assert len(found) == 4 * len(dtypes) * len(targets) and not [kernel for kernel in found if kernel.fault]
    monkeypatch.setattr(gelu, "BACKWARD_PROGRAMS", 16)
    faults = {kernel.variant.operation: kernel.fault for kernel in compile_resident() if kernel.fault}
    assert faults.keys() == {"bias_gelu"}
    assert faults["bias_gelu"].startswith("launches 16 programs a multiprocessor, of which ")


def is_resident(variant: "bench.Variant") -> bool:
    """Whether its grid is sized by the number of multiprocessors."""
    launches = bench.launches_of(variant.operation, variant.size, variant.dtype)
    return launches[variant.index].resident is not None


def test_registers_are_limited_on_nvidia_alone():
    """AMD's compiler rejects an option that it does not know."""
    for target, limit in (("sm_90", 128), ("gfx942", None)):
        _, backward, _ = bench.launches_of("layer_norm", Size(64, 768), torch.bfloat16, target)
        assert backward.kernel.__name__ == "_backward_kernel"
        assert backward.options.get("maxnreg") == limit


def test_compile_table(capsys):
    arguments = [
        "--compile-only",
        "--only",
        "swiglu",
        "--models",
        "gpt_7b",
        "--dtypes",
        "bf16",
        "--processes",
        "1",
    ]
    assert kernels.main(arguments) == 0
    shown = capsys.readouterr().out
    assert (
        all(target in shown for target in bench.TARGETS)
        and "8 kernels" in shown
        and "none with a fault" in shown
    )


def test_a_fault_in_the_table_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(bench, "WIDE", 256)
    arguments = [
        "--compile-only",
        "--only",
        "swiglu",
        "--models",
        "gpt_7b",
        "--dtypes",
        "bf16",
        "--processes",
        "1",
    ]
    assert kernels.main(arguments) == 1
    fault = "swiglu, _forward_kernel at 8192 × 11008 in bf16 for sm_80: loads 128 bits at most"
    assert fault in capsys.readouterr().out


def test_shares_and_goals():
    """A share is the copy's time over the kernel's; rows of 1K have a lower goal."""
    found = Measured(
        "gelu",
        Size(4, 4096),
        "torch.bfloat16",
        "forward",
        8,
        0.95,
        {"triton": 2.0, "copy": 1.0, "eager": 4.0},
        {},
    )
    assert found.share("triton") == 0.5 and found.share("liger") is None and not found.slower_than_eager
    norm = OPERATIONS["layer_norm"]
    assert [norm.goal(backward, width) for backward in (False, True) for width in (1024, 4096)] == [
        0.85,
        0.95,
        0.85,
        0.85,
    ]


def test_bytes_that_must_be_moved():
    """Of 2 heads of 4 queries and 4 keys a causal mask shows 20 scores of 32; AdamW's
    are those that its formula names.
    """
    assert OPERATIONS["causal_softmax"].moved(Size(8, 4), 2) == ((20 + 32) * 2, (40 + 32) * 2)
    # reads g, p, m, v; writes p, m, v and a copy
    assert OPERATIONS["adamw"].moved(Size(16, 1), 2)[0] == 16 * (4 * 4 + 3 * 4 + 2)


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.kernels", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)


def test_dry_run(tmp_path):
    """All that a run on a GPU does, but at tiny sizes: comparison with fp64, turns,
    tables, JSON and chart.
    """
    done = run_module("--dry-run", "--only", "swiglu", "adamw", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("kernels_dry_run_*.json")
    report = json.loads(path.read_text(encoding="utf-8"))
    assert {found["direction"] for found in report["measured"]} == {"forward", "backward"} and len(
        report["errors"]
    ) == 4
    assert all(found["seconds"].keys() == {"triton", "eager", "copy"} for found in report["measured"])
    assert report["versions"]["triton"] and report["date"] and path.with_suffix(".svg").stat().st_size


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(ValueError, match="there is no GPU to measure on .*--compile-only"):
        kernels.main([])
    with pytest.raises(ValueError, match="'dropout' is no operation .*bias_dropout_residual"):
        kernels.main(["--compile-only", "--only", "dropout"])
