"""What `import megacore` offers a notebook besides the classes of the core: train, generate,
prove and plan on one process.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megacore.config import Config
from megacore.tools.settings.load import load

if TYPE_CHECKING:  # each function imports what it needs: a plan needs no torch
    from megacore.distributed.mesh import Mesh
    from megacore.model.batch import Microbatch
    from megacore.tools.planner.memory import RankMemory
    from megacore.tools.planner.step_time import Prediction
    from megacore.tools.verify.run import Proof
    from megacore.train.step import TrainStep


def load_config(path: str, overrides: Sequence[str] = (), world_size: int = 1) -> Config:
    """A checked config with all its values and its model cut into stages, from a JSON file and
    `section.key=value` overrides, for so many ranks.

    Raises `ConfigError`, which says what is wrong and what would be right.
    """
    from megacore.tools.choices.partition import partitioned

    return partitioned(load(path, list(overrides), world_size).config)


def one_process(config: Config) -> "Mesh":
    """The mesh of this process alone, on `train.device`; sets the process up as a run does, so
    call it before the first product.
    """
    from megacore.distributed.mesh import Mesh
    from megacore.distributed.rank_info import RankInfo
    from megacore.tools.crowd import share_cores
    from megacore.tools.machine.device import take_device

    place = RankInfo()
    device = take_device(config, place)
    mesh = Mesh(config, place, device)
    mesh.listeners.add(*share_cores(config, place.world_size, device))
    return mesh


def batches(config: Config, mesh: "Mesh", first_step: int = 1) -> "Iterator[tuple[int, list[Microbatch]]]":
    """The steps of a run from `first_step` to `train.steps`, each with this
    rank's microbatches of `data.train`.
    """
    from megacore.distributed.events import Listener
    from megacore.tools.corpora import checked_stream
    from megacore.train.loader import Loader

    loader = Loader(config, mesh, checked_stream(config))
    try:
        for step in range(first_step, config.train.steps + 1):
            mesh.listeners.notify(Listener.on_step_begin, step, True)
            yield step, loader.read(step)
    finally:
        loader.close()


def generate(
    step: "TrainStep", prompt: str, tokens: int = 100, temperature: float = 0.8, seed: int = 0
) -> str:
    """Return `prompt` and the text that a model continues it with, while it is trained on one process.

    `data.tokenizer` encodes the prompt. The prompt begins with a BOS token if the documents of the training
    data do, or, where these do not tell, if the tokenizer puts one.
    """
    from megacore.config.schema import resolved
    from megacore.tools.text.decoding import Decoder
    from megacore.tools.text.sampling import Sampler
    from megacore.tools.text.stream import TextStream
    from megacore.tools.text.tokenizer import load_tokenizer
    from megacore.tools.text.vocabulary import encode_prompt, prompt_begin

    step.engine.settle()
    tokenizer = load_tokenizer(resolved(step.config.data.tokenizer))
    vocab = tokenizer.vocab_size
    for stage in step.stages:
        stage.eval()
    begin, _ = prompt_begin(tokenizer, "auto", step.config.data.train)
    prompt_tokens = encode_prompt(tokenizer, prompt, begin)
    decoder = Decoder(step.stages, step.mesh)
    sampler = Sampler(temperature, vocab, 1.0, seed, vocab)
    stream = TextStream(tokenizer, prompt_tokens)
    generated = decoder.generate(prompt_tokens, tokens, sampler, tokenizer.generation_ends, begin)
    text = "".join([stream.push(token) for token in generated]) + stream.end()
    for stage in step.stages:
        stage.train()
    return prompt + text


def prove(
    path: str, layouts: str = "tp2,pp2,dp2", overrides: Sequence[str] = (), precision: str = "fp64"
) -> "Proof":
    """What `launch/verify.py` does: layouts of a small model like the config's, each held against
    one process, tensor by tensor.

    `Proof.holds` says whether all are equal. It starts as many processes as the largest layout has ranks.
    """
    from megacore.tools.verify.layouts import parse
    from megacore.tools.verify.run import Options
    from megacore.tools.verify.run import prove as run

    return run(
        Options(path, list(overrides), [parse(name) for name in layouts.split(",")], precision, None, None)
    )


def predict(config: Config, device: str = "h100", cluster: str = "dgx_h100") -> "Prediction":
    """How long a step takes on a device and cluster that `launch/plan.py` knows: `step` seconds, and
    the `terms` that make them up.
    """
    from megacore.tools.planner.devices import read_cluster, read_device
    from megacore.tools.planner.profile import profile
    from megacore.tools.planner.step_time import predict
    from megacore.tools.planner.workload import setting_of

    return predict(setting_of(config), read_device(device), read_cluster(cluster), profile("megacore"))


def memory(config: Config) -> "list[RankMemory]":
    """Bytes at the peak of each rank of the pipeline, by what holds them."""
    from megacore.tools.planner.memory import rank_memory

    return rank_memory(config)
