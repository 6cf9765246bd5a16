"""What each slice runs, in the order of its value, and how long each part may take; the standard library only."""

from dataclasses import dataclass

HERE = "benchmarks.gpu"


@dataclass(frozen=True)
class Part:
    """A function, as ``module:function``, which takes `Rows` and `arguments`, and the seconds that it may take."""

    name: str
    seconds: int
    function: str
    arguments: tuple[str, ...] = ()
    dry: bool = True  # whether a dry run has it


@dataclass(frozen=True)
class Slice:
    """Parts, and the seconds that all of them together may take."""

    title: str
    seconds: int
    parts: tuple[Part, ...]


def speed_parts() -> tuple[Part, ...]:
    """A process for each model, compiled or not: the micro batches follow each other in it."""
    return tuple(
        Part(
            f"{config}{', compiled' if compiled == 'true' else ''}",
            seconds,
            f"{HERE}.speed:steps",
            (config, compiled),
            config == "gpt_124m",
        )
        for config, seconds in (("gpt_124m", 60), ("gpt_350m", 70), ("gpt_1b", 80))
        for compiled in ("false", "true")
    )


SLICES = {
    "right": Slice(
        "It computes what it should",
        420,
        (
            Part("training", 260, f"{HERE}.right:tests", ("test_training.py",)),
            Part("environment", 40, f"{HERE}.right:environment_check"),
            Part("communicator", 60, f"{HERE}.communicator:communicator"),
            Part("synchronisation", 110, f"{HERE}.steps:synchronisation"),
            Part("streams", 60, f"{HERE}.steps:streams"),
            Part(
                "tests",
                90,
                f"{HERE}.right:tests",
                ("test_staging.py", "test_main_gradient.py", "test_document_attention.py"),
            ),
        ),
    ),
    "kernels": Slice(
        "Fused kernels",
        360,
        (
            Part("tests", 150, f"{HERE}.kernels:tests"),
            Part("bandwidth", 90, f"{HERE}.kernels:bandwidth"),
            Part("in the step", 150, f"{HERE}.kernels:in_the_step"),
            Part("compute-sanitizer", 90, f"{HERE}.kernels:sanitizer"),
        ),
    ),
    "speed": Slice(
        "Training steps", 480, (*speed_parts(), Part("plain-gpt-compiled", 140, f"{HERE}.speed:beside"))
    ),
    "choices": Slice(
        "What to choose",
        300,
        (
            Part("attention", 80, f"{HERE}.choices:attention"),
            Part("products", 50, f"{HERE}.choices:products"),
            Part("shards", 50, f"{HERE}.choices:shards"),
            Part("held multiprocessors", 50, f"{HERE}.choices:held"),
            Part("predicted", 90, f"{HERE}.choices:predicted"),
        ),
    ),
}
