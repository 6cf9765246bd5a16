"""Training itself on a real GPU: the checks that tests/unit/test_device_checks.py makes on the CPU."""

from pathlib import Path

import pytest
import torch

from tests import device_checks as checks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("model", [[], checks.GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_step_equals_fp64_on_the_cpu(precision: str, model: list[str]) -> None:
    checks.check_step("cuda", precision, *model)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_are_one_graph(recompute: str) -> None:
    checks.check_one_graph("cuda", "inductor", f"train.recompute={recompute}")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fsdp_equals_native(precision: str) -> None:
    checks.check_fsdp("cuda", precision)


def test_deepspeed_equals_native(tmp_path: Path) -> None:
    if reason := checks.lacking("deepspeed"):
        pytest.skip(reason)
    checks.check_engine("cuda", checks.write_config(tmp_path), tmp_path, "deepspeed")


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_resume_is_bitwise(tmp_path: Path, compiled: str) -> None:
    checks.check_resume(
        "cuda", checks.write_config(tmp_path), tmp_path, "train.precision=bf16", f"train.compile={compiled}"
    )


def test_text_is_that_of_the_cpu(tmp_path: Path) -> None:
    checks.check_generate("cuda", checks.write_config(tmp_path), tmp_path)
