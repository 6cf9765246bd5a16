"""A class of transformers that megacore trains has the losses of the loop that one would write for it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.model.plain.exact import in_fp64
from tests import plain, training
from tests.build import run_of
from tests.plain_modules import write_folder

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[test]'")

STEPS = 5
# For four ranks: every class has a stage of its embedding and one of its head, and tied ones are reduced.
LAYOUT = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true"]
TOLERANCE = 1e-12


def write_run(folder: Path, kind: str) -> str:
    """Write a class's first weights and a run that starts from them; return the path of the run's config.

    Rates differ from step to step, and weight decay and clipping are as large as the gradients.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    weights = write_folder(folder, kind)
    settings = AutoConfig.from_pretrained(weights)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(settings).save_pretrained(weights)
    return training.write_config(
        folder,
        training.write_corpus(folder),
        model={
            "hf": str(weights),
            "num_layers": settings.num_hidden_layers,
            "vocab_size": settings.vocab_size,
        },
        train={"steps": STEPS, "precision": "fp64"},
        optim={
            "warmup_steps": 3,
            "decay_steps": STEPS,
            "min_lr": 5e-4,
            "weight_decay": 0.3,
            "grad_clip": 0.5,
        },
        checkpoint={"weights": str(weights), "last": False},
    )


def train_with_transformers(config_path: str) -> list[tuple[float, float]]:
    """Train the untouched class, in fp64 on one process; return each step's loss and gradient norm."""
    from transformers import AutoModelForCausalLM

    config = run_of(config_path)
    optim, folder = config.optim, config.model.hf
    with in_fp64():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": optim.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
        )

        steps = []
        for step in range(1, STEPS + 1):
            tokens = plain.batch(config, step)
            loss = model(tokens, labels=tokens, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
            for group in optimizer.param_groups:
                group["lr"] = plain.rate(config, step)
            optimizer.step()
            steps.append((loss.item(), norm.item()))
    return steps


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_five_steps_are_those_of_the_loop_of_transformers(pool: Any, tmp_path: Path, kind: str) -> None:
    """From the first weights through gradients, clipping, rates and decay: nothing here is megacore's but the
    order of samples. A part of the module that a rank leaves out, or takes twice, shows in the first losses.
    """
    config_path = write_run(tmp_path, kind)
    expected = pool.run(1, train_with_transformers, config_path)[0]
    norms = [norm for _, norm in expected]
    assert len(set(expected)) == STEPS and max(norms) > 0.5, "some steps must be clipped"

    for ranks, overrides in ((1, []), (4, LAYOUT)):
        log_dir = str(tmp_path / f"on {ranks} ranks")
        assert pool.run(ranks, training.run_rank, config_path, overrides, log_dir) == [0] * ranks
        assert training.difference(training.figures(log_dir), expected) < TOLERANCE
